"""Configuration: schema, loader, presets and the rules on combinations. Imports no torch."""

from erase_rec.config.catalog import Catalog, Group
from erase_rec.config.load import LoadedConfig, config_hash, dump_config, find_config, load_config
from erase_rec.config.schema import Config

__all__ = ["Catalog", "Config", "Group", "LoadedConfig", "config_hash", "dump_config", "find_config", "load_config"]
