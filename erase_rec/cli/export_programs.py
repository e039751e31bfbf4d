"""The programs of an export: traced, written, and loaded again the way another program would."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from erase_rec.cli.export_inputs import ModelInputs
from erase_rec.config.schema import FeaturesConfig
from erase_rec.errors import UserError
from models.ctr_model import CTRModel
from models.served import ServedModel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Score = Callable[[ModelInputs], tuple[Tensor, Tensor]]
"""Probability and logit, float32 [B] each."""

_TOWER = re.compile(r"_blocks\.(\d+)")


def trace(model: CTRModel, features: FeaturesConfig, example: ModelInputs) -> ExportedProgram:
    """The program of a whole model: any number of rows, and of values of the multi-valued features.

    Args:
        model: on the CPU, in float32 and in evaluation mode; the program shares its weights.
        features: of the model.
        example: at least 2 rows, and 2 values of each multi-valued feature: sizes of 0 and 1 would be taken for fixed.
    """
    varies = {0: Dim.DYNAMIC}
    shapes = (varies, varies, tuple(tuple(varies for _ in bag) for bag in example.bags))
    served = ServedModel(model, features.sparse)
    served.train(False)
    with _quiet(), torch.no_grad():
        whole = torch.export.export(served, example.arguments(), dynamic_shapes=shapes)
        # Traced again without what the first time showed to be unused: heads whose logits nobody reads.
        used = whole.module(check_guards=False)
        assert isinstance(used, torch.fx.GraphModule)
        used.graph.eliminate_dead_code()
        used.delete_all_unused_submodules()
        used.recompile()
        return torch.export.export(used, example.arguments(), dynamic_shapes=shapes)


def save_program(program: ExportedProgram, path: Path) -> None:
    """Writes a program for :func:`load_program`.

    Raises:
        OSError: it cannot be written.
    """
    with _PatientFile(io.FileIO(path, "w")) as file:
        with _quiet():
            torch.export.save(program, file)
        if file.error is not None:
            raise file.error


class _PatientFile(io.BufferedWriter):
    """A file that keeps the first error of writing for later: torch's writer ends the process where one is raised.

    Attributes:
        error: the first one.
    """

    error: OSError | None = None

    def write(self, buffer: ReadableBuffer, /) -> int:
        """As of any file, but for errors; bytes after one are dropped."""
        if self.error is None:
            try:
                return super().write(buffer)
            except OSError as error:
                self.error = error
        return memoryview(buffer).nbytes


def load_program(path: Path) -> Score:
    """A program that :func:`save_program` wrote; runs on any machine with this version of torch or a later one."""
    with _quiet():
        module = torch.export.load(path).module(check_guards=False)

    def score(inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            probability, logit = module(*inputs.arguments())
        return probability, logit

    return score


def refuse_without_compiler() -> None:
    """Ends the command where ``--aot`` cannot be had.

    Raises:
        UserError: there is no C++ compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "--aot: AOTInductor compiles the model, and there is no C++ compiler here; install g++ (or name another in "
            "the environment variable CXX), or export without --aot"
        ) from None


def save_aot(program: ExportedProgram, path: Path) -> None:
    """Compiles a program for CPUs like this one.

    Raises:
        UserError: it cannot be compiled here.
    """
    from torch._inductor.exc import CppCompileError

    try:
        with _quiet():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except CppCompileError as error:
        raise UserError(
            f"--aot: the C++ compiler fails ({str(error).splitlines()[0]}); export without --aot, or try another "
            "compiler with the environment variable CXX"
        ) from error


def load_aot(path: Path) -> Score:
    """A package that :func:`save_aot` wrote."""
    with _quiet():
        package = torch._inductor.aoti_load_package(str(path))

    def score(inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        probability, logit = package(*inputs.arguments())
        return probability, logit

    return score


def refuse_without_onnx() -> None:
    """Ends the command where ``--onnx`` cannot be had.

    Raises:
        UserError: a package is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--onnx: {error.name} is not installed; pip install 'erase-rec[export]', or export without --onnx"
        ) from None


def save_onnx(
    program: ExportedProgram, path: Path, tower_names: list[str], input_names: list[str], output_names: list[str]
) -> None:
    """Writes a program as ONNX.

    Args:
        program: traced by :func:`trace`.
        path: the file; weights past 2 GiB go to another one beside it.
        tower_names: for the message.
        input_names: one for each tensor of :meth:`erase_rec.cli.export_inputs.ModelInputs.flat`.
        output_names: of probability and logit.

    Raises:
        UserError: the model has an operation that ONNX has none for; names it and its tower.
    """
    try:
        with _quiet():
            converted = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=input_names, output_names=output_names
            )
            assert converted is not None, "no file was asked for"
            converted.save(path)
    except torch.onnx.OnnxExporterError as error:
        operation, place = _culprit(error, program, tower_names)
        raise UserError(
            f"--onnx: {place} uses {operation}, which cannot be expressed in ONNX; export without --onnx, or train "
            "without it"
        ) from error


def load_onnx(path: Path) -> Score:
    """A file that :func:`save_onnx` wrote, in ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def score(inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in zip(names, inputs.flat(), strict=True)}
        probability, logit = session.run(None, arrays)
        return torch.from_numpy(probability), torch.from_numpy(logit)

    return score


def _culprit(error: BaseException, program: ExportedProgram, tower_names: list[str]) -> tuple[str, str]:
    """The operation that could not be translated, and the part of the model that it is in."""
    cause: BaseException | None = error
    found = None
    while cause is not None and found is None:
        found = re.search(r"node %(\w+) .*?target=([\w.]+)", str(cause))
        cause = cause.__cause__
    if found is None:
        return f"something ({str(error).splitlines()[0]})", "the model"
    name, target = found.groups()
    operation = target.removeprefix("torch.ops.")
    base = operation.split(".")[1] if "." in operation else operation
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    same = [node for node in nodes if node.name == name] or [node for node in nodes if base in str(node.target)]
    stack = str(same[0].meta.get("nn_module_stack", "")) if same else ""
    if (tower := _TOWER.search(stack)) is not None:
        return operation, f"tower {tower_names[int(tower[1])]!r}"
    return operation, "the over-arch" if "over_arch" in stack else "the model"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks on itself, its retired functions and packages that are not here."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
