"""Export without torch, compared with what torch itself loads, and read back by the safetensors package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranks
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from mgpu_train.checkpoint.formats import archives, export
from mgpu_train.checkpoint.formats.archives import Unsupported
from mgpu_train.store.base import Damaged, NotFound, StoreError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SAVES = Path(__file__).with_name("exports.py")


def launch(out: Path, count: int) -> None:
    started = ranks.meet(SAVES, count, out, said=out / "said")
    try:
        assert [rank.wait() for rank in started] == [0] * count, started[0].said
    finally:
        for rank in started:
            rank.kill()


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of 1, 2 and 4 ranks."""
    out = tmp_path_factory.mktemp("exports")
    (out / "text").mkdir()
    for number in range(12):
        (out / "text" / f"{number}").write_text("the quick brown fox " * 20)
    for count in (1, 2, 4):
        launch(out, count)
    return out


def by_torch(folder: Path, tmp: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder, tmp / "whole.pt")
    return torch.load(tmp / "whole.pt", weights_only=False)["model"]


def read_back(dest: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(dest.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        ours, torchs = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(ours, torchs), name


def names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir()))


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it saves in a single process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("name", ["1-single", "2-ddp", "2-fsdp", "4-ddp", "4-fsdp", "4-by-hand"])
def test_what_any_number_of_ranks_saved_is_what_torch_loads(saves, tmp_path, name):
    checkpoint = saves / name / "step-2"
    report = export.export(checkpoint, tmp_path / "out")
    expected = by_torch(checkpoint, tmp_path)
    same(read_back(tmp_path / "out"), expected)
    assert report.tensors == len(expected)
    assert report.bytes == sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    assert report.files == ("config.json", "model.safetensors") == names(tmp_path / "out")


@pytest.mark.parametrize("name", ["2-ddp", "4-fsdp"])
def test_the_optimizer_can_be_exported_as_well(saves, tmp_path, name):
    export.export(saves / name / "step-2", tmp_path / "out", keys="optimizer.state")
    state = read_back(tmp_path / "out")
    assert state["head.weight.exp_avg"].shape == (256, 10)
    assert float(state["head.weight.step"]) == 2


def test_the_configuration_and_the_origin_travel_with_it(saves, tmp_path):
    checkpoint = saves / "2-fsdp" / "step-2"
    export.export(checkpoint, tmp_path / "out", provenance={"run": "r-1", "checkpoint_id": "a001-step-2"})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "mgpu_lm"
    assert config["dtype"] == "float32"
    assert config["config"]["model"].items() >= {"layers": 2, "dim": 10, "heads": 1}.items()
    meta = json.loads((checkpoint / "meta.json").read_text())
    assert config["provenance"] | meta == meta | {"run": "r-1", "checkpoint_id": "a001-step-2"}
    assert config["provenance"]["step"] == 2
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        said = file.metadata()
    assert (said["format"], said["run"], said["checkpoint_id"], said["step"]) == ("pt", "r-1", "a001-step-2", "2")


DTYPES = sorted(archives.ITEM_BYTES.keys() & export.safetensors_file.DTYPES.keys())


def numbers(dtype: str) -> torch.Tensor:
    """Each element another bit pattern, not only numbers."""
    kind = getattr(torch, dtype)
    raw = torch.arange(6 * kind.itemsize, dtype=torch.uint8) % (2 if dtype == "bool" else 251)
    return raw.view(kind).reshape(2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    state = {"t": numbers(dtype), "empty": numbers(dtype)[:0]}
    folder = saved(tmp_path / "in", {"model": state})
    if dtype == "float4_e2m1fn_x2":  # safetensors counts two numbers a byte
        export.export(folder, tmp_path / "out")
        with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
            assert file.get_slice("t").get_shape() == [2, 6]
            assert file.get_slice("t").get_dtype() == "F4"
        assert (tmp_path / "out" / "model.safetensors").read_bytes().endswith(bytes(range(6)))
        return
    export.export(folder, tmp_path / "out")
    same(read_back(tmp_path / "out"), state)


@pytest.mark.parametrize("dtype", ["complex128", "complex32"])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_dtype_that_safetensors_lacks_is_refused_by_its_name(tmp_path, dtype):
    state = {"good": torch.ones(2), "odd": torch.zeros(2, dtype=getattr(torch, dtype))}
    with pytest.raises(Unsupported, match=rf"model\.odd is of {dtype}"):
        export.export(saved(tmp_path / "in", {"model": state}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "complex64"])
def test_memory_in_another_order_is_written_in_row_major_order(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(archives, "PIECE", 64)  # rows in several pieces
    base = (torch.arange(4 * 5 * 6 * 7) % 2 if dtype == "bool" else torch.arange(4 * 5 * 6 * 7)).to(
        getattr(torch, dtype)
    )
    base = base.reshape(4, 5, 6, 7)
    state = {
        "transposed": base[0, 0].t(),
        "permuted": base.permute(3, 1, 0, 2),
        "channels": base.to(memory_format=torch.channels_last),
        "column": base.reshape(-1, 1).t(),
        "slice": base[:, 1:3],
        "expanded": base[:1, :1, :1, :1].expand(2, 3, 4, 5),
        "scalar": base[1, 2, 3, 4],
    }
    export.export(saved(tmp_path / "in", {"model": state}), tmp_path / "out")
    same(read_back(tmp_path / "out"), state)


def test_an_element_of_16_bytes_is_gathered_too(tmp_path):
    matrix = torch.randn(3, 4, dtype=torch.complex128).t()
    shards = export.open_shards(saved(tmp_path / "in", {"t": matrix}))
    (tensor,) = shards.tensors.values()
    data = bytearray(b"".join(shards.read(tensor, tensor.chunks[0])))
    assert torch.equal(torch.frombuffer(data, dtype=torch.complex128).reshape(4, 3), matrix)


def test_tensors_that_share_memory_are_written_under_each_name(tmp_path):
    weight = torch.randn(3, 4)
    state = {"embed": weight, "head": weight, "view": weight[1]}
    report = export.export(saved(tmp_path / "in", {"model": state}), tmp_path / "out")
    same(read_back(tmp_path / "out"), state)
    assert report.bytes == (12 + 12 + 4) * 4


def test_files_stay_below_their_limit_and_the_index_finds_each_tensor(tmp_path):
    state = {f"t{number}": torch.randn(size) for number, size in enumerate([10, 10, 30, 5, 5, 5])}
    state["wide"] = torch.arange(3)  # after narrow ones of the same file, and still aligned
    folder = saved(tmp_path / "in", {"model": {"b": torch.tensor([True]), **state}})
    moved: list[int] = []
    report = export.export(folder, tmp_path / "out", max_shard_bytes=84, progress=moved.append)
    assert sum(moved) == report.bytes == export.size(folder) == 65 * 4 + 24 + 1
    files = [name for name in report.files if name.endswith(".safetensors")]
    assert files == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": report.bytes}
    assert index["weight_map"].keys() == state.keys() | {"b"}
    for name, file in index["weight_map"].items():
        tensors = load_file(tmp_path / "out" / file)
        assert torch.equal(tensors[name], {**state, "b": torch.tensor([True])}[name])
        if len(tensors) > 1:  # one alone may be larger than the limit
            assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) <= 84
    for file in files:
        raw = (tmp_path / "out" / file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert length % 8 == 0
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                width = {"BOOL": 1, "F32": 4, "I64": 8}[entry["dtype"]]
                assert entry["data_offsets"][0] % width == 0


ALONE = """
import sys
for name in ("torch", "numpy", "safetensors"):
    sys.modules[name] = None  # an import of it fails
from pathlib import Path
from mgpu_train.checkpoint.formats.export import export
export(Path(sys.argv[1]), Path(sys.argv[2]))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_neither_torch_nor_memory_for_a_tensor_is_needed(tmp_path, require):
    require("proc", Path("/proc/self/status").exists(), "there is no /proc")
    peaks = []
    for mib in (1, 192):
        folder = saved(tmp_path / f"in-{mib}", {"model": {"w": torch.zeros(mib << 18)}})
        out = tmp_path / f"out-{mib}"
        done = subprocess.run([sys.executable, "-c", ALONE, folder, out], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) >> 10)  # MiB
        assert (out / "model.safetensors").stat().st_size > mib << 20
    assert peaks[1] - peaks[0] < 24, peaks


# --- what is refused ---


def test_a_folder_of_pickles_is_no_dcp_folder(tmp_path):
    (tmp_path / "in").mkdir()
    torch.save({"model": {}}, tmp_path / "in" / "state.pt")
    with pytest.raises(Unsupported, match=r"neither \.metadata.*nor \*\.safetensors"):
        export.export(tmp_path / "in", tmp_path / "out")
    with pytest.raises(NotFound, match="there is no folder"):
        export.export(tmp_path / "nowhere", tmp_path / "out")
    assert names(tmp_path) == ("in",)


def test_keys_that_hold_no_tensors_are_refused_with_those_that_do(tmp_path):
    folder = saved(tmp_path / "in", {"net": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}, "step": 3})
    with pytest.raises(Unsupported, match="no tensors below 'model'; it has some below ema, net"):
        export.export(folder, tmp_path / "out")
    assert export.export(folder, tmp_path / "out", keys="").tensors == 2
    assert read_back(tmp_path / "out").keys() == {"net.w", "ema.w"}


def test_a_name_that_the_format_keeps_for_itself_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="__metadata__"):
        export.export(saved(tmp_path / "in", {"model": {"__metadata__": torch.ones(1)}}), tmp_path / "out")


@pytest.mark.parametrize("taken", ["file", "folder", "link"])
def test_nothing_is_written_over(tmp_path, taken):
    folder, dest = saved(tmp_path / "in", {"model": {"w": torch.ones(1)}}), tmp_path / "out"
    if taken == "file":
        dest.write_text("mine")
    elif taken == "folder":
        dest.mkdir()
        (dest / "mine").write_text("mine")
    else:
        dest.symlink_to(tmp_path / "nowhere")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(Unsupported, match="name a new folder"):
        export.export(folder, dest)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    (tmp_path / "out").mkdir()
    export.export(saved(tmp_path / "in", {"model": {"w": torch.ones(1)}}), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_fails_halfway_leaves_nothing(tmp_path):
    folder = saved(tmp_path / "in", {"model": {"a": torch.ones(100), "b": torch.ones(100)}})
    shard = folder / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[data.rindex(torch.ones(4).numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Damaged, match="CRC-32"):
        export.export(folder, tmp_path / "out")
    assert names(tmp_path) == ("in",)


def test_a_disk_that_is_full_is_said_as_such(tmp_path, monkeypatch):
    folder = saved(tmp_path / "in", {"model": {"a": torch.ones(100)}})

    def full(*_: Any) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match=r"No space left on device\. Free some space"):
        export.export(folder, tmp_path / "out")
    assert names(tmp_path) == ("in",)


# --- what is exported already ---


@pytest.fixture
def hugging(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": torch.randn(3, 4), "b": torch.ones(2)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "meta.json").write_text('{"step": 7}')
    torch.save({}, folder / "optimizer.bin")
    return folder


def test_safetensors_pass_through_and_pickles_stay_behind(hugging, tmp_path):
    moved: list[int] = []
    report = export.export(hugging, tmp_path / "out", progress=moved.append, provenance={"run": "r-1"})
    assert report == export.ExportReport(("config.json", "model.safetensors", "tokenizer.json"), 2, 14 * 4)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (hugging / "model.safetensors").read_bytes()
    assert sum(moved) == export.size(hugging) == (hugging / "model.safetensors").stat().st_size
    assert json.loads((tmp_path / "out" / "config.json").read_text())["provenance"] == {"step": 7, "run": "r-1"}


def test_a_configuration_that_is_there_stays_as_it_is(hugging, tmp_path):
    (hugging / "config.json").write_text('{"model_type": "gpt2"}')
    export.export(hugging, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "gpt2"}'


@pytest.mark.parametrize("how", ["cut", "longer", "empty", "header", "hole", "no json", "a list"])
def test_a_file_that_is_no_whole_safetensors_is_refused(hugging, tmp_path, how):
    path = hugging / "model.safetensors"
    data = path.read_bytes()
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    rest = data[8 + len(text) :]
    wrong = {"hole": text.replace(b"[0,", b"[4,"), "no json": b"{" * len(text), "a list": b"[1]".ljust(len(text))}
    path.write_bytes({
        "cut": data[:-1], "longer": data + b"\0", "empty": b"", "header": b"\xff" * 8 + data[8:],
    }.get(how) or data[:8] + wrong.get(how, b"") + rest if how != "empty" else b"")  # fmt: skip
    with pytest.raises(Damaged, match="safetensors file"):
        export.export(hugging, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_a_meta_json_that_is_none_is_refused(hugging, tmp_path, text):
    (hugging / "meta.json").write_text(text)
    with pytest.raises(Damaged, match=r"meta\.json is no JSON object"):
        export.export(hugging, tmp_path / "out")


def test_shards_come_before_safetensors_that_lie_beside_them(tmp_path):
    folder = saved(tmp_path / "in", {"model": {"w": torch.ones(3)}})
    shutil.copy(export.export(folder, tmp_path / "out") and tmp_path / "out" / "model.safetensors", folder)
    save_file({"other": torch.ones(1)}, folder / "model.safetensors")
    export.export(folder, tmp_path / "again")
    assert read_back(tmp_path / "again").keys() == {"w"}
