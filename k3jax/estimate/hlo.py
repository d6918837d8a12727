"""Collectives in the text of a compiled program (optimised HLO), and what a device sends in each.

    a group of n devices, each of which gives `size` bytes:
    all-gather       size (n - 1)            reduce-scatter   size (n - 1) / n        all-reduce   2 size (n - 1) / n
    all-to-all       size (n - 1) / n        collective-permute   size

These are what the ring and the pairwise algorithms send; a program says the same whatever the algorithm. A loop counts
as often as its known trip count says, the branches of a conditional as the one that sends most, and the start and the
done of an asynchronous collective once. A group is named by the mesh axes it spans; devices are numbered row-major.

Invariant: every collective that the entry computation reaches is counted, in a group of one device it is nothing, and
what the text does not say (the trips of a loop that holds a collective, an unknown form of groups) raises ValueError.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
UNNAMED = "?"  # a group that is no set of mesh axes

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s({]+) .*\{$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([^\s,{}()]+)")
_CALLED_LISTS = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?)\))? \{([^}]*)\}")


class Collective(NamedTuple):
    """One collective instruction.

    Attributes:
        kind: one of KINDS ("ragged-" and the like are part of the kind they belong to).
        groups: [groups, devices in each] numbers of devices; of a permute [pairs, 2], source and target.
        size: bytes that a device gives.
        times: how often it runs in one run of the program.
        name: where the program's author wrote it (metadata), "" if the text does not say.
    """

    kind: str
    groups: np.ndarray
    size: int
    times: int
    name: str

    @property
    def sent(self) -> float:
        """Bytes that one device sends each time; of a permute, a device that has another one to send to."""
        if self.kind == "collective-permute":
            return float(self.size)
        devices = self.groups.shape[1]
        share = (devices - 1) / devices
        factor = {"all-reduce": 2 * share, "all-gather": devices - 1}.get(self.kind, share)
        return self.size * factor


def collectives(text: str) -> list[Collective]:
    """All collectives of a program that send something. Raises ValueError for what the text leaves open."""
    return _Program(text).of(None)


def axes_of(collective: Collective, sizes: Mapping[str, int]) -> str:
    """The mesh axes that a collective's groups span, "fsdp+expert"; UNNAMED if they are no set of axes.

    sizes: devices along each axis, in the mesh's order. Of a permute: all axes along which anything moves.
    """
    groups = collective.groups
    if groups.size and groups.max() >= math.prod(sizes.values()):
        return UNNAMED
    places = np.stack(np.unravel_index(groups, tuple(sizes.values())), axis=-1)  # [groups, devices, axes]
    varies = (places != places[:, :1]).any(axis=(0, 1))
    names = [name for name, moves in zip(sizes, varies, strict=True) if moves]
    distinct = all(len(set(group)) == len(group) for group in groups.tolist())
    whole = groups.shape[1] == math.prod(sizes[name] for name in names) and distinct
    if collective.kind != "collective-permute" and not whole:
        return UNNAMED
    return "+".join(names)


class _Instruction(NamedTuple):
    shape: str
    opcode: str
    operands: str
    attributes: str


class _Program:
    """The computations of a program: name -> name of an instruction -> what stands behind `=`, read when asked for."""

    def __init__(self, text: str):
        self.lines: dict[str, dict[str, str]] = {}
        self.entry = None
        self._found: dict[str, list[Collective]] = {}
        current: dict[str, str] = {}
        for line in text.splitlines():
            if found := _LINE.match(line):
                current[found[1]] = found[2]
            elif (found := _HEADER.match(line)) and not line.startswith("HloModule"):
                current = self.lines[found[2]] = {}
                if found[1]:
                    self.entry = found[2]
        if self.entry is None:
            raise ValueError("the text has no ENTRY computation")

    def of(self, computation: str | None) -> list[Collective]:
        """Collectives of one run of a computation (None: the entry), those of the called ones included."""
        name = self.entry if computation is None else computation
        if name not in self.lines:
            raise ValueError(f"computation {name} is called but not there")
        if name not in self._found:
            self._found[name] = [c for line in self.lines[name].values() for c in self._of_line(name, line)]
        return self._found[name]

    def _of_line(self, computation: str, line: str) -> Iterator[Collective]:
        called = [match[2] for match in _CALLED.finditer(line)]
        lists = {match[1]: re.findall(r"[^\s,%]+", match[2]) for match in _CALLED_LISTS.finditer(line)}
        if not called and not lists and not any(kind in line for kind in KINDS):
            return
        _, opcode, operands, attributes = _split(line)
        kind = opcode.removesuffix("-start").removeprefix("ragged-")
        if kind in KINDS:
            groups = _groups(kind, attributes)
            if groups.shape[1] > 1 and (kind != "collective-permute" or (groups[:, 0] != groups[:, 1]).any()):
                size = self._size(computation, operands, ragged=opcode.startswith("ragged-"))
                name = _NAME.search(attributes)
                yield Collective(kind, groups, size, 1, name[1] if name else "")
        elif opcode == "conditional":
            names = dict(match.groups() for match in _CALLED.finditer(line))
            both = [names[key] for key in ("true_computation", "false_computation") if key in names]
            branches = [self.of(name) for name in (lists.get("branch_computations") or both)]
            yield from max(branches, key=lambda branch: sum(c.times * c.sent for c in branch), default=[])
        elif opcode == "while":
            inside = [c for name in called for c in self.of(name)]
            trips = _TRIPS.search(attributes)
            if inside and trips is None:
                raise ValueError(f"a loop with {len(inside)} collectives does not say how often it runs: {line[:200]}")
            yield from (c._replace(times=c.times * int(trips[1])) for c in inside)
        elif not opcode.endswith(("-done", "-update")):
            for name in (*called, *(name for names in lists.values() for name in names)):
                yield from self.of(name)

    def _size(self, computation: str, operands: str, *, ragged: bool) -> int:
        """Bytes of the operands; a ragged exchange sends the first one, at most."""
        names = re.findall(r"%([^\s,()]+)", operands) or re.findall(r"[^\s,]+", operands)
        shapes = [_split(self.lines[computation][name])[0] for name in names[: 1 if ragged else None]]
        return sum(map(shape_bytes, shapes))


def _split(line: str) -> _Instruction:
    """What stands behind `name =`: the shape, a tuple in parentheses or not; opcode(operands); attributes."""
    at = _closing(line, 0) if line.startswith("(") else line.index(" ")
    shape, rest = line[:at].strip(), line[at:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return _Instruction(shape, rest[:opening], rest[opening + 1 : closing - 1], rest[closing:])


def _closing(text: str, opening: int) -> int:
    """The place behind the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.finditer(r"[()]", text[opening:]):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return opening + match.end()
    raise ValueError(f"unbalanced parentheses: {text[:200]}")


def shape_bytes(shape: str) -> int:
    """Bytes of `bf16[4,8]{1,0}` or of a tuple of such: "(f32[2], s32[])"."""
    total = 0
    for kind, dimensions in _SHAPE.findall(shape):
        bits = _ITEM_BITS.get(kind)
        if bits is None:
            bits = int(re.search(r"\d+", kind)[0])  # f32, bf16, f8e4m3fn, s4, c64
        total += -(-bits * math.prod(int(n.removeprefix("<=")) for n in dimensions.split(",") if n) // 8)
    return total


def _groups(kind: str, attributes: str) -> np.ndarray:
    """replica_groups or source_target_pairs of an instruction."""
    key = "source_target_pairs=" if kind == "collective-permute" else "replica_groups="
    if key not in attributes:
        raise ValueError(f"{kind} without {key[:-1]}: {attributes[:200]}")
    written = attributes[attributes.index(key) + len(key) :]
    if written.startswith("{"):
        rows = re.findall(r"\{([\d,]*)\}", written[1 : written.index("}}") + 1] if "}}" in written else "")
        lists = [[int(n) for n in row.split(",") if n] for row in rows]
        if not lists or len({len(row) for row in lists}) != 1:
            raise ValueError(f"{kind} over {written[:80]}: groups of one size are expected")
        return np.array(lists)
    if found := _IOTA.match(written):
        return _iota(found).reshape(_numbers(found[1]))
    if found := _MESH.match(written):
        return _of_mesh(*found.groups())
    raise ValueError(f"{kind} over {written[:80]}: unknown form")


def _iota(found: re.Match) -> np.ndarray:
    """The numbers of `[8,2]<=[2,2,4]T(1,0,2)`, in order: 0, 1, ... in the second shape, transposed."""
    numbers = np.arange(math.prod(_numbers(found[2]))).reshape(_numbers(found[2]))
    return numbers.transpose(_numbers(found[3])) if found[3] else numbers


def _of_mesh(axes: str, device_ids: str | None, named: str) -> np.ndarray:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`: over axes of a mesh of its own; a part `'b':(1)2` too."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    devices = np.arange(math.prod(sizes.values()))
    if device_ids is not None:
        if found := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids):
            devices = devices.reshape(_numbers(found[1]))
            devices = devices.transpose(_numbers(found[2])) if found[2] else devices
        else:
            devices = np.array(_numbers(device_ids))
    shape, over = [], []
    parts = {name: (int(before or 1), int(size or 0)) for name, before, size in
             re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named)}  # fmt: skip
    for name, size in sizes.items():
        if name not in parts:
            shape.append(size)
            continue
        before, inside = parts[name]
        inside = inside or size
        over.append(len(shape) + 1)
        shape += [before, inside, size // before // inside]
    devices = devices.reshape(shape)
    rest = [at for at in range(len(shape)) if at not in over]
    return devices.transpose(*rest, *over).reshape(-1, math.prod(shape[at] for at in over))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))
