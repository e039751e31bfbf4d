"""The configuration schema. Imports no torch, so that a mistake is reported before anything heavy is loaded.

Vocabulary: one word for one thing in YAML, code, TensorBoard tags and documents. ``None`` in a field whose
comment says "from the preset" is filled by :mod:`erase_rec.config.presets` before anything reads it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from erase_rec.config.types import Boolean, Integer, Model, Number, Selection, Text, Texts

SCHEMA_VERSION = 1
"""Rises when a file that was right gets another meaning, or none."""

PositiveInt = Annotated[Integer, Field(gt=0)]
NonNegativeInt = Annotated[Integer, Field(ge=0)]
PositiveNumber = Annotated[Number, Field(gt=0)]
NonNegativeNumber = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(gt=0, lt=1)]

ComponentParams = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
"""Parameters of a registered component, checked against its kind; null: its defaults."""

PresetName = Literal[
    "exact", "exact_streams", "detached", "erase", "paper_row3", "paper_row2", "paper_row1", "paper_row0"
]


class LabelConfig(Model):
    """How the label is read. Without a rule the column must hold 0 and 1."""

    column: Text | None = None
    """Column name; ``None``: the source's own (Criteo, Avazu, synthetic)."""
    positive: Texts | None = None
    """Values (as text) that mean 1; with ``negative`` unset every other value means 0."""
    negative: Texts | None = None
    """Values (as text) that mean 0; a value in neither list is an error."""
    at_least: Number | None = None
    """Threshold rule for a rating column: 1 where the value is at least this."""


class SplitConfig(Model):
    """Which rows of the training files are held out where ``data.eval`` names no files."""

    by: Literal["row", "hash", "column", "time"] = "row"
    """``row``: ``data.eval_fraction`` of the rows by a hash of (seed, row). ``hash``: of the values of ``column`` by a
    hash of (seed, value), so that all rows of a user stay together. ``column``: the rows whose ``column`` holds one of
    ``values``. ``time``: the rows whose ``column`` is at ``since`` or later."""
    column: Text | None = None
    """What ``by`` looks at, as the file names it."""
    values: Texts = ()
    """``by: column``: values (as text) of rows that are held out."""
    since: Text | None = None
    """A number, or a time in ISO 8601."""


class ExpectedConfig(Model):
    """What the rows must come to; any other number ends the run before it trains."""

    train_rows: PositiveInt | None = None
    """Training rows, after the split."""
    eval_rows: PositiveInt | None = None
    """Held-out rows."""
    label_rate: Fraction | None = None
    """Share of clicks in the training rows, to 0.0005."""


class DataConfig(Model):
    """Where rows come from. ``params`` belongs to the source's ``kind``."""

    kind: Text
    """How the files are written: one of the data sources below."""
    train: Texts = ()
    """Paths, globs, or URLs that fsspec opens (``s3://...``)."""
    eval: Texts = ()
    """Held-out rows, named as ``train`` is; none: ``eval_fraction`` or ``split`` hold out training rows."""
    eval_fraction: Fraction | None = None
    """Share of the training rows that ``split`` holds out when ``eval`` names no file."""
    split: SplitConfig = SplitConfig()
    prepared: Text | None = None
    """Folder that ``erase-rec prepare`` wrote for these data, label, split and features: rows are read from there."""
    reading: Literal["memory", "stream"] = "memory"
    """Rows that are not prepared: encoded once and kept in memory, or read and encoded again in every epoch."""
    label: LabelConfig = LabelConfig()
    row_id: Text | None = None
    """Column that names each row; no value may be on both sides of the split, or twice on one."""
    expected: ExpectedConfig | None = None
    """Of a published protocol, whose files others supply."""
    negative_sampling_rate: Fraction | None = None
    """Share of the training rows with label 0 that are trained on, drawn by a hash of seed and row; held-out rows stay
    as they are. Logits of evaluation, predictions and exports are corrected by its logarithm, so that they speak of all
    rows (He et al., ADKDD 2014, section 6.3)."""
    negatives_sampled: Boolean = False
    """The training files hold that share of the negative rows only: nothing is drawn, and logits are corrected."""
    bad_rows: Literal["error", "skip", "quarantine"] = "error"
    """Rows that cannot be read: stop at the first, leave them out and count them, or also write them to a file."""
    max_bad_share: Fraction = 0.01
    """``skip`` and ``quarantine``: more bad rows than this share (and than 100) end the reading."""
    shuffle: Boolean = True
    """Train in another order in each epoch; false: in the order of the files."""
    shuffle_window: PositiveInt = 262_144
    """Rows that are shuffled among each other, at least: blocks of rows are drawn in random order until they hold so
    many. Memory grows with it."""
    workers: NonNegativeInt | None = None
    """Threads that assemble batches ahead of the step; the order does not depend on it. Left out: up to 4 where a CUDA
    device trains, none on a CPU, whose cores the step needs."""
    params: ComponentParams = Field(default_factory=dict)
    """Of the source's kind."""


class DenseFeatureConfig(Model):
    """A numeric feature."""

    name: Text
    """What messages, overrides and inputs of towers call it."""
    column: Text | None = None
    """Column in the source; ``None``: the feature's name."""
    transform: Literal["log", "standardize", "none"] = "log"
    """``log`` is sign(x) * log(1 + abs(x)); every result is finite in float32."""
    fill: Number = 0.0
    """Raw value that a missing cell takes, before the transform."""
    missing_values: Texts = ()
    """Texts, besides the empty one, that mean missing (``?``, ``NA`` ...)."""


class SparseFeatureConfig(Model):
    """A categorical feature. Its table has two rows more than categories: missing (0) and unseen (1)."""

    name: Text
    """What messages, overrides and inputs of towers call it; its table's name."""
    column: Text | None = None
    """Column in the source; ``None``: the feature's name."""
    encoding: Literal["hash", "vocabulary", "id"] = "hash"
    """How a category becomes a row of the table: by its hash, its rank by count, or as the number that it is."""
    derive: Literal["log_square", "hour", "weekday", "weekend"] | None = None
    """Category computed from the cell: of a count v above 2 floor(log(v)^2), else v without its fraction; or of a time
    written YYMMDDHH its hour, weekday (0: Sunday) or weekend (1 or 0). ``None``: the cell itself."""
    num_embeddings: PositiveInt | None = None
    """Categories: buckets of ``hash``, the id range of ``id`` (both need it), an upper bound for ``vocabulary``."""
    min_count: PositiveInt = 1
    """``vocabulary``: a category seen fewer times in the training rows counts as unseen."""
    embedding_dim: PositiveInt | None = None
    """``None``: ``embedding.dim``."""
    pooling: Literal["sum", "mean"] = "sum"
    """Of the embeddings of a bag."""
    multi_valued: Boolean = False
    """A bag of categories: a list column, or text split at ``separator``. An empty bag pools to zero."""
    separator: Text | None = None
    """Between the categories of a text; ``None``: a list column."""
    weights: Text | None = None
    """Column of per-value weights, parallel to the values; ``sum`` pooling only."""
    max_length: PositiveInt | None = None
    """Longer bags keep their first values."""
    missing_values: Texts = ()
    """Texts, besides the empty one, that mean missing."""
    fill: Text | None = None
    """Category that a missing cell takes; ``None`` or empty: missing stays a category of its own."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class DenseDefaults(Model):
    """Defaults of ``features.dense`` entries."""

    transform: Literal["log", "standardize", "none"] | None = None
    fill: Number | None = None
    missing_values: Texts | None = None


class SparseDefaults(Model):
    """Defaults of ``features.sparse`` entries."""

    encoding: Literal["hash", "vocabulary", "id"] | None = None
    derive: Literal["log_square", "hour", "weekday", "weekend"] | None = None
    num_embeddings: PositiveInt | None = None
    min_count: PositiveInt | None = None
    embedding_dim: PositiveInt | None = None
    pooling: Literal["sum", "mean"] | None = None
    multi_valued: Boolean | None = None
    separator: Text | None = None
    max_length: PositiveInt | None = None
    missing_values: Texts | None = None
    fill: Text | None = None


class FeaturesConfig(Model):
    """The features in model order. An entry may be a bare name; the defaults fill what an entry leaves out."""

    dense_defaults: DenseDefaults = DenseDefaults()
    sparse_defaults: SparseDefaults = SparseDefaults()
    dense: tuple[Annotated[DenseFeatureConfig, BeforeValidator(_named)], ...] = ()
    sparse: tuple[Annotated[SparseFeatureConfig, BeforeValidator(_named)], ...] = ()


class TableShardingConfig(Model):
    """How one table is spread over several ranks, where ``embedding.sharding`` spreads tables."""

    name: Text
    """The sparse feature whose table it is."""
    sharding: Literal["auto", "table_wise", "row_wise", "column_wise", "data_parallel"] | None = None
    """``None``: as ``embedding.sharding`` says."""
    kernel: Literal["fused", "fused_uvm", "fused_uvm_caching"] | None = None
    """FBGEMM's kernel: rows in device memory, in host memory, or there with a cache on the device (the last two: CUDA
    only). ``None``: ``fused``."""
    cache_share: Annotated[PositiveNumber, Field(lt=1)] | None = None
    """``fused_uvm_caching``: share of the table's rows that the device has room for; ``None``: FBGEMM's 0.2. A rank's
    such tables share one cache."""
    column_width: PositiveInt | None = None
    """``column_wise``: columns of a part, which divide the table's; ``None``: the planner's choice."""


class EmbeddingConfig(Model):
    """Embedding tables, one a sparse feature."""

    backend: Literal["auto", "torchrec", "torch"] = "auto"
    """``auto``: torchrec on CUDA where it and fbgemm import, else torch. Both give the same results to tolerance."""
    dim: PositiveInt = 16
    """Columns of the tables whose feature names none."""
    sharding: Literal["replicated", "auto", "table_wise", "row_wise", "column_wise", "data_parallel"] = "replicated"
    """On several ranks. ``replicated``: each holds all tables and looks up the ids of all. ``data_parallel``: each
    holds all tables and looks up its own ids, and gradients of whole tables are averaged. The others spread tables,
    their rows or their columns over the ranks through TorchRec; ``auto`` lets its planner choose table by table."""
    tables: tuple[TableShardingConfig, ...] = ()
    """What is to hold for single tables."""


class LossConfig(Model):
    """A tower's declared local loss on the click label."""

    kind: Text = "bce"
    """One of the local losses below."""
    weight: NonNegativeNumber = 1.0
    """lambda: the factor in the sum of losses."""
    target: Literal["own", "joint"] = "own"
    """``own``: the tower's logit alone; ``joint``: plus the sum of the other towers' logits under stop-gradient."""
    params: ComponentParams = Field(default_factory=dict)
    """Of the loss's kind."""


class HeadConfig(Model):
    """A tower's local head: from its output to its logit. ``params`` belongs to the head's ``kind``."""

    kind: Text = "linear"
    """One of the heads below."""
    params: ComponentParams = Field(default_factory=dict)
    """Of the head's kind."""


class TowerInputsConfig(Model):
    """What a tower reads: everything, nothing, or the named features."""

    dense: Selection = True
    """Dense features: all, none, or those named."""
    sparse: Selection = True
    """Sparse features: all, none, or those named."""
    towers: Texts = ()
    """Earlier towers whose outputs it reads beside the dense features, cut where those towers are detached."""


class TowerConfig(Model):
    """A dense sub-architecture with its local head. ``params`` belongs to the tower's ``kind``."""

    name: Annotated[Text, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
    """What metrics, checkpoints and overrides call it: letters, digits, underscores."""
    kind: Text
    """One of the towers below."""
    inputs: TowerInputsConfig = TowerInputsConfig()
    detach: Boolean | None = None
    """Cut the output before the over-arch. ``None``: from the preset."""
    stream: Text | None = None
    """``own``, ``main``, or a name that several towers share. ``None``: from the preset."""
    loss: LossConfig | None = None
    head: HeadConfig = HeadConfig()
    cut_at: NonNegativeInt = 0
    """Layers above the cut, counted from the tower's output: the over-arch's loss trains them, and the local head reads
    what is below."""
    frozen: Boolean = False
    """Keep its parameters as they are."""
    params: ComponentParams = Field(default_factory=dict)
    """Of the tower's kind."""


class OverArchConfig(Model):
    """The MLP on the towers' outputs."""

    hidden: tuple[PositiveInt, ...] = (64, 32)
    """Sizes of its hidden layers."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """After each hidden layer."""
    logits: Literal["none", "inputs", "additive", "gated"] = "none"
    """Local logits: not used, inputs of the MLP, added to its output, or added with a factor a row and tower that the
    MLP's last layer gives; cut where the tower is detached."""


class ModelConfig(Model):
    """How towers and over-arch are computed, whatever they compute."""

    compile: Boolean = False
    """Fuse operations inside towers and over-arch with TorchInductor; CUDA only."""
    kernels: Literal["auto", "plain"] = "auto"
    """``auto``: this project's own kernels where they apply (CUDA, bf16); ``plain``: PyTorch's operations."""


class ScheduleConfig(Model):
    """The order of work on streams. Fields left out come from the preset."""

    preset: PresetName = "exact"
    """Fills what is left open here, in ``distributed``, and in the towers' ``detach`` and ``stream``."""
    early_backward: Boolean | None = None
    """Launch a detached tower's backward before the over-arch; false: one backward at the end."""
    dispatch: Literal["blocking", "non_blocking"] | None = None
    """Who launches early backwards: the main thread, or a worker."""
    workers: PositiveInt = 1
    """``non_blocking``: threads that call early backwards; one keeps them in order."""
    cuda_graph: Literal["none", "tower", "dense", "step"] | None = None
    """What is captured and replayed: nothing, each early tower, all but the tables, or the whole step."""
    optimizer: Literal["end", "per_tower"] | None = None
    """Update all at the end of the step, or a tower as soon as its gradient is there."""
    embedding_gradient: Literal["main", "local", "both", "none"] | None = None
    """Which losses train the tables: the main loss, the local ones, both, or none."""
    exact_every: Annotated[Integer, Field(ge=2)] | None = None
    """Every so many steps nothing is cut: one backward of all losses, after all towers."""
    launch_order: Texts = ()
    """Towers in the order in which the host launches them; empty: as they stand."""
    high_priority: Texts = ()
    """Towers whose kernels a CUDA device starts before those of the others."""
    parameters_beside: Boolean = False
    """``cuda_graph: step``, ``dense``: gradients that only parameters need run beside the backward's chain."""
    matmul_share: Annotated[PositiveNumber, Field(le=1)] = 1.0
    """CUDA: share of the multiprocessors that matrix products' kernels are chosen for, so that towers fit beside."""
    autotune: Boolean = False
    """``cuda_graph: step``: choose the four above by a short measurement at the start."""
    strict: Boolean = False
    """``cuda_graph``: a step that cannot be replayed ends the run, naming the cause, instead of running uncaptured."""


class DistributedConfig(Model):
    """Ranks that train together, started by torchrun."""

    reduction: Literal["ddp", "ddp_per_tower", "bucket"] | None = None
    """How dense gradients are averaged over ranks. ``None``: ``bucket`` with several ranks, nothing with one."""
    find_unused_parameters: Boolean | None = None
    """FUP; has a meaning with ``reduction: ddp`` only. ``None``: false."""
    bucket_mib: PositiveNumber = 25.0
    """``bucket``: size at which gradients of the over-arch are cut into chunks."""
    check_every: PositiveInt = 100
    """Steps between two comparisons of the ranks' parameters and collectives; several ranks only."""
    timeout_s: PositiveNumber = 300.0
    """Longest wait for another rank."""


class DenseOptimizerConfig(Model):
    """Optimizer of towers, heads and over-arch."""

    kind: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    """The update rule."""
    lr: PositiveNumber = 1e-3
    """Base learning rate, times ``lr_schedule``'s factor."""
    weight_decay: NonNegativeNumber = 0.0
    """L2 penalty's factor; ``adamw``: decoupled from the gradient."""
    beta1: Fraction = 0.9
    """``adam``, ``adamw``: decay of the mean gradient."""
    beta2: Fraction = 0.999
    """``adam``, ``adamw``: decay of the mean square."""
    eps: PositiveNumber = 1e-8
    """Added to the root in the denominator."""
    momentum: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """``sgd``: momentum."""
    max_grad_norm: PositiveNumber | None = None
    """Norm that gradients are clipped to; ``None``: no clipping."""
    clip: Literal["global", "per_tower"] = "global"
    """Over which gradients the norm is: all dense ones, or each tower's (and the over-arch's) alone."""


class SparseOptimizerConfig(Model):
    """Optimizer of the embedding tables, fused into their backward where the backend can."""

    kind: Literal["rowwise_adagrad", "adagrad", "adam", "sgd"] = "rowwise_adagrad"
    """The update rule; ``rowwise_adagrad`` keeps one number a row."""
    lr: PositiveNumber = 1e-2
    """Base learning rate, times ``lr_schedule``'s factor."""
    beta1: Fraction = 0.9
    """``adam``: decay of the mean gradient."""
    beta2: Fraction = 0.999
    """``adam``: decay of the mean square."""
    eps: PositiveNumber = 1e-8
    """Added to the root in the denominator."""


class LRScheduleConfig(Model):
    """Factor on both base learning rates by step: linear warm-up, then the decay of ``kind``."""

    kind: Literal["constant", "linear", "cosine", "poly", "step", "plateau"] = "constant"
    """The decay after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the factor grows from near 0 to 1."""
    decay_steps: PositiveInt | None = None
    """Steps from the end of warm-up to ``min_factor``; ``None``: to the end of training."""
    min_factor: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """The factor does not fall below."""
    power: PositiveNumber = 1.0
    """``poly``: exponent."""
    step_every: PositiveInt | None = None
    """``step``: steps between two multiplications by ``gamma``."""
    gamma: Fraction = 0.1
    """``step`` and ``plateau``: the multiplier."""
    patience: PositiveInt = 1
    """``plateau``: evaluations in a row without improvement before the multiplication."""
    metric: Text = "eval.ne"
    """``plateau``: what is watched."""


class OptimizerConfig(Model):
    """Optimizers and the learning-rate schedule that they share."""

    dense: DenseOptimizerConfig = DenseOptimizerConfig()
    sparse: SparseOptimizerConfig = SparseOptimizerConfig()
    lr_schedule: LRScheduleConfig = LRScheduleConfig()


class EarlyStoppingConfig(Model):
    """Stops after ``patience`` evaluations in a row without improvement; nan is never an improvement."""

    metric: Text = "eval.ne"
    """What is watched."""
    patience: PositiveInt = 3
    """Evaluations in a row without improvement before training stops."""
    min_delta: NonNegativeNumber = 0.0
    """An improvement is at least this large."""


class WarmStartConfig(Model):
    """What another run learnt, taken over before the first step: whole towers, over-arch and tables, tables by row.

    Rows of a ``vocabulary`` go by category, others by number. What was taken, initialised and ignored is said, and
    written to ``warm_start.json`` in the run folder.
    """

    path: Text
    """A run folder, of which the best checkpoint counts (without evaluations: the newest), or a checkpoint in it."""
    rename: dict[Text, Text] = Field(default_factory=dict)
    """New names by names in the checkpoint, such as ``tables/user: tables/member``; ``*`` stands for anything:
    ``model/towers.deep.*: model/towers.wide.*``. A dense feature is ``dense/NAME``."""
    missing: Literal["error", "init"] = "error"
    """What the checkpoint has not, or in another shape: end the run, or initialise it (a tower or table as a whole)."""
    optimizer: Boolean = False
    """Take over the optimizers' states, too; false: they start anew."""


class TrainConfig(Model):
    """The loop. Exactly one of ``steps``, ``epochs`` and ``samples`` says how long."""

    steps: PositiveInt | None = None
    """Updates."""
    epochs: PositiveInt | None = None
    """Passes over the training rows."""
    samples: PositiveInt | None = None
    """Rows to train on, over all ranks."""
    local_batch_size: PositiveInt = 1024
    """Rows of a step on one rank."""
    micro_batches: PositiveInt = 1
    """Parts that a rank's rows of a step are cut into; their gradients are added up, as of one batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: a CUDA device where there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """``bf16``: towers and over-arch compute in bfloat16, with float32 master weights."""
    tf32: Boolean = False
    """CUDA: products of float32 matrices in TF32."""
    threads: PositiveInt | None = None
    """CPU threads of torch; ``None``: torch's choice."""
    log_every_steps: PositiveInt = 50
    """Steps of a window of the run log. Beyond 10,000 rows of the log the interval doubles whenever the steps double,
    so that logs stay bounded."""
    eval_every_steps: PositiveInt | None = None
    """``None``: at the end of each epoch and at the end."""
    checkpoint_every_steps: PositiveInt | None = None
    """``None``: at each evaluation."""
    checkpoint_async: Boolean = False
    """Go on training while a checkpoint is written, from a copy of the state in host memory; false: wait for the disk.
    Takes as much host memory as tables, parameters and optimizer states, on CUDA up to twice as much."""
    keep_checkpoints: PositiveInt = 2
    """Retained besides the best."""
    warmup_qps_steps: NonNegativeInt = 10
    """Steps left out of the throughput statistics."""
    early_stopping: EarlyStoppingConfig | None = None
    init_from: WarmStartConfig | None = None


class EvalConfig(Model):
    """Evaluation on held-out rows."""

    local_batch_size: PositiveInt = 4096
    """Rows that are scored together on one rank."""
    base_rate: Literal["eval", "train", "window"] = "eval"
    """Constant prediction that NE compares with: the share of clicks in the held-out rows, in all training rows, or in
    the training rows of the last window of the run log. With sampled negatives it is corrected as logits are."""
    scores: Boolean = False
    """Write each row's label and predictions to ``scores.parquet`` in the run folder."""


class RunConfig(Model):
    """Where a run writes."""

    dir: Text = "runs"
    """Folder of the run folders."""
    name: Text | None = None
    """Folder name; ``None``: configuration name, hash of the configuration and start time."""


class Config(Model):
    """A whole configuration."""

    schema_version: Annotated[Integer, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of the words in this file; files of another one are refused. ``erase-rec schema`` prints the schema."""
    seed: NonNegativeInt = 1
    """Of initial weights, shuffling, splits and rows that are made up."""
    data: DataConfig
    features: FeaturesConfig
    embedding: EmbeddingConfig = EmbeddingConfig()
    towers: Annotated[tuple[TowerConfig, ...], Field(min_length=1)]
    over_arch: OverArchConfig = OverArchConfig()
    model: ModelConfig = ModelConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    distributed: DistributedConfig = DistributedConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()
