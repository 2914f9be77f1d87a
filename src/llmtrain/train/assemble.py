"""One Hugging Face directory from the parts of all ranks: ``python -m llmtrain.train.assemble``, an order on stdin.

Files, names and order of the tensors are the base model's; tensor by tensor, so that memory holds one of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from llmtrain.errors import InputFileError, LlmtrainError
from llmtrain.process import write_json
from llmtrain.spec.weights import INDEX, read_weights
from llmtrain.train.checkpoint import NOTE, finish_configs
from llmtrain.train.merge import CONFIG, PREFIX, WEIGHTS, copy_rest, merge, read_table
from llmtrain.train.modeldir import new_directory
from llmtrain.train.runjson import RankRun, read_run
from llmtrain.train.shards import LAYOUT, Layout, Piece, locate, parse_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH = {"bf16": 2, "fp32": 4}
SAFETENSORS = {"bf16": "BF16", "fp32": "F32"}
TORCH = {"bf16": "bfloat16", "fp32": "float32"}
ROOM = 1.5
"""Times the size of the model that must be free to load it for a proof."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of all ranks, in one precision."""

    layout: Layout
    """The parameters."""
    files: Mapping[int, Path]
    """Rank -> its numbers."""
    where: Mapping[str, list[Piece]]
    """Parameter -> its pieces."""
    dtype: str
    """``bf16`` or ``fp32``."""

    def read(self, name: str) -> bytearray:
        """All numbers of a parameter, in their order."""
        width, data = WIDTH[self.dtype], bytearray()
        for piece in self.where[name]:
            with self.files[piece.rank].open("rb") as stream:
                stream.seek(piece.start * width)
                data += stream.read(piece.count * width)
        return data


def read_parts(folders: Sequence[Path], dtype: str) -> Parts:
    """Find the parts that the hosts extracted.

    Raises:
        InputFileError: some are missing, or they do not add up.
    """
    layouts = [folder / LAYOUT for folder in folders if (folder / LAYOUT).is_file()]
    if not layouts:
        raise InputFileError("no host had the files of rank 0", where=str(folders[0]))
    layout = parse_layout(layouts[0].read_text(encoding="utf-8"))
    found = [json.loads(path.read_text(encoding="utf-8")) for folder in folders for path in folder.glob("rank-*.json")]
    files = {int(path.stem[5:]): path for folder in folders for path in folder.glob("rank-*.bin")}
    sizes = {said["rank"]: said["groups"] for said in found}
    return Parts(layout=layout, files=files, where=locate(layout, sizes), dtype=dtype)


# --- a whole model


def write_model(parts: Parts, base: Path, partial: Path) -> int:
    """Write the base's weight files with the trained numbers in them; returns how many tensors were trained.

    Raises:
        InputFileError: the base's files have other tensors than the checkpoint.
    """
    files, tensors = read_weights(base)
    names = match_names(parts.layout, {name: tensor.shape for name, tensor in tensors.items()}, str(base))
    total = 0
    for file in files:
        total += _write_file(base / file.name, partial / file.name, parts, names)
    if (base / INDEX).is_file():
        index = json.loads((base / INDEX).read_text(encoding="utf-8"))
        write_json(partial / INDEX, {**index, "metadata": {**index.get("metadata", {}), "total_size": total}})
    return len(set(names.values()))


def match_names(layout: Layout, base: Mapping[str, Sequence[int]], where: str) -> dict[str, str]:
    """Tensor of the base's files -> parameter of the checkpoint, for those that are one. Pure.

    Older files leave the name of the inner model out, and tied weights stand there under one of their names.

    Raises:
        InputFileError: a parameter has no place in the base's files, or has another shape there.
    """
    shapes = {name: tuple(shape) for group in layout.groups for name, shape in group}
    known = {**{name: name for name in shapes}, **layout.shared}
    ends = {name.partition(".")[2]: name for name in known}
    found = {name: known.get(name) or known.get(ends.get(name, ""), "") for name in base}
    found = {name: parameter for name, parameter in found.items() if parameter}
    lost = sorted(set(shapes) - set(found.values()))
    odd = sorted(name for name, parameter in found.items() if tuple(base[name]) != shapes[parameter])
    if lost or odd:
        example = lost[0] if lost else odd[0]
        raise InputFileError(
            f"{len(lost) or len(odd)} trained tensors have no place of their shape in the base model's files, for"
            f" example {example}",
            where=where,
            fix="take the output of a run that ended: transformers renames the tensors of this model when it saves",
        )
    return found


def _write_file(source: Path, target: Path, parts: Parts, names: Mapping[str, str]) -> int:
    head, table = read_table(source)
    order = sorted((name for name in table if name != "__metadata__"), key=lambda name: table[name]["data_offsets"])
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        begin, end = table[name]["data_offsets"]
        trained = name in names
        size = math.prod(table[name]["shape"]) * WIDTH[parts.dtype] if trained else end - begin
        kind = SAFETENSORS[parts.dtype] if trained else table[name]["dtype"]
        rows[name] = {"dtype": kind, "shape": table[name]["shape"], "data_offsets": [at, at + size]}
        at += size
    with source.open("rb") as old, target.open("wb") as stream:
        stream.write(_render_head(rows))
        for name in order:
            begin, end = table[name]["data_offsets"]
            stream.write(parts.read(names[name]) if name in names else _read_range(old, len(head) + begin, end - begin))
        os.fsync(stream.fileno())
    return at


def _render_head(rows: Mapping[str, Any]) -> bytes:
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_range(stream: IO[bytes], at: int, count: int) -> bytes:
    stream.seek(at)
    return stream.read(count)


# --- adapters


def write_adapter(parts: Parts, run: RankRun, folder: Path) -> int:
    """Write the trained adapters as a PEFT directory; returns how many tensors they have."""
    from peft import LoraConfig

    assert run.lora is not None  # noqa: S101  the caller looked
    names = {name: PREFIX + name.removeprefix(PREFIX).replace(".default.", ".") for name in parts.where}
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=run.lora.rank,
        lora_alpha=run.lora.alpha,
        target_modules=targets,
        base_model_name_or_path=run.model.path,
    )
    config.save_pretrained(str(folder))
    shapes = {name: shape for group in parts.layout.groups for name, shape in group}
    rows, at = {}, 0
    for name, kept in names.items():
        size = math.prod(shapes[name]) * WIDTH[parts.dtype]
        rows[kept] = {"dtype": SAFETENSORS[parts.dtype], "shape": shapes[name], "data_offsets": [at, at + size]}
        at += size
    with (folder / WEIGHTS).open("wb") as stream:
        stream.write(_render_head(rows))
        for name in names:
            stream.write(parts.read(name))
    return len(names)


# --- the order


def assemble(order: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out an order.

    Args:
        order: ``run`` (a run.json), ``checkpoint``, ``parts`` (folders), ``dtype``, ``output`` (a new folder).

    Returns:
        ``tensors``, ``bytes``, ``files`` (name -> [bytes, SHA-256]), ``merged``, ``loaded`` ("yes", or why not),
        ``peak_rss_bytes``.

    Raises:
        InputFileError: the parts are not whole, or the base is another one.
    """
    run = read_run(Path(order["run"]))
    base, output = Path(run.model.path), Path(order["output"])
    parts = read_parts([Path(folder) for folder in order["parts"]], order["dtype"])
    note = json.loads((Path(order["checkpoint"]) / NOTE).read_text(encoding="utf-8"))
    merged = run.lora is not None
    if merged:
        tensors = _merge_adapter(parts, run, base, output)
        _finish(run, base, output, note, order["dtype"])
    else:
        with new_directory(output) as partial:
            partial.mkdir()
            copy_rest((base,), partial)
            tensors = write_model(parts, base, partial)
            _finish(run, base, partial, note, order["dtype"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    files = {path.name: (path.stat().st_size, _digest(path)) for path in sorted(output.iterdir())}
    size = sum(count for name, (count, _) in files.items() if name.endswith(".safetensors"))
    loaded = _load(output, size)
    return {
        "tensors": tensors,
        "bytes": size,
        "files": files,
        "merged": merged,
        "loaded": loaded,
        "peak_rss_bytes": peak,
    }


def _merge_adapter(parts: Parts, run: RankRun, base: Path, output: Path) -> int:
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        tensors = write_adapter(parts, run, Path(folder))
        assert (Path(folder) / CONFIG).is_file()  # noqa: S101  PEFT wrote it
        merge(Path(folder), output, base=base)
    return tensors


def _finish(run: RankRun, base: Path, folder: Path, note: Mapping[str, Any], dtype: str) -> None:
    """Tokenizer with the template of the training, configuration, and a card."""
    from llmtrain.train.templates import load_tokenizer

    load_tokenizer(run)[0].save_pretrained(folder)
    if run.lora is None:
        finish_configs(folder, base, TORCH[dtype], note.get("stop_tokens", []))
    card = (
        f"# {base.name}, tuned\n\nWeights after step {note['step']} of the llmtrain run {note['run_id']}, exported from"
    )
    (folder / "README.md").write_text(f"{card} its checkpoint.\nBase model: {run.model.path}\n", encoding="utf-8")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _load(output: Path, size: int) -> str:
    """Load the model as a user would, where it fits; "yes", or why it was not done.

    Raises:
        InputFileError: transformers does not find all tensors in it.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < ROOM * size:
        return f"not loaded: it needs {ROOM * size / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(
        str(output), dtype="auto", local_files_only=True, output_loading_info=True
    )
    if info["missing_keys"]:
        raise InputFileError(f"transformers misses {min(info['missing_keys'])}", where=str(output))
    return "yes"


def main() -> int:
    """Carry out the order on stdin, and print one JSON object; returns the exit code."""
    try:
        said = assemble(json.load(sys.stdin))
    except LlmtrainError as problem:
        said = {"error": problem.error, "where": problem.where, "fix": problem.fix}
    except OSError as problem:
        said = {"error": str(problem), "where": problem.filename, "fix": "df -h"}
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    return int("error" in said)


if __name__ == "__main__":
    sys.exit(main())
