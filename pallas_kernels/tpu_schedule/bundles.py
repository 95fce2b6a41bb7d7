"""Reads the final bundles that libtpu prints for one op of a program.

A bundle is what a core issues in one cycle. One line of the text is

    0x19 LB: > { %s5_s2 = sadd.s32 1, %s4_s1  ;;  %104 = sbr.rel (%p101_p0) target = $region24 }

where `%s5_s2` is value 5 in physical register s2, `(!%p)` a predicate, each `>` one more loop
around, and a comment after the closing brace says which regions, the targets of branches, start.
"""

import dataclasses
import math
import re

_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +[A-Z: ]*([> ]*)(?=\{)", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGIONS = re.compile(r"@([\d,]*)@")  # what a comment is replaced by: the regions it starts
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_INSTRUCTION = re.compile(r"(?:(%\S+) = )?(\S+)\s*(.*)", re.DOTALL)
_PREDICATE = re.compile(r"\((!?)(%p\w+)(?:, (%\w+))?\)")
_ATTRIBUTE = re.compile(r"\[(thread|resolvable|shape)[^]]*\]")
_STORE = re.compile(r"(\[.*\]),?\s*(\S+)$")
_OPERAND = re.compile(
    r"(%\w+) = inlined_call_operand\.(\S+|<[^>]*>)"
    r" \[shape: ([^:]*), index: (\d+), kind: (\w+)"
)
_CORE_ID = re.compile(r"(%\w+) = sld \[smem:[^/;]*/\* [^*]*core id")
_BOUNDS = re.compile(r"iteration_bounds: \(([\d, ]*)\)")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One slot of a bundle.

    args: as written, of scalar instructions only (those of vectors do not matter to time).
    predicate: register, and whether it is negated; `otherwise` is what the result is when it is
      off (None: the result keeps its value).
    unit: "mxu0", "xlu1", or None; sources: physical registers that are read.
    packed: operands of 16 bits or fewer.
    """

    result: str | None
    op: str
    args: tuple[str, ...]
    predicate: tuple[str, bool] | None
    otherwise: str | None
    unit: str | None
    sources: tuple[str, ...]
    packed: bool


@dataclasses.dataclass(frozen=True)
class Bundle:
    instructions: tuple[Instruction, ...]
    loop_depth: int
    regions: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that the op is called with: `space` "hbm" or "vmem", `kind` "input" or "output"."""

    index: int
    space: str
    shape: str
    kind: str

    @property
    def bytes(self) -> int:
        """Padded to tiles of (8, 128), as memory holds it."""
        found = re.fullmatch(r"(\w+)\[([\d,]*)\]", self.shape)
        if found is None:  # a token or a tuple
            return 0
        dtype, dims = found.groups()
        sizes = [int(size) for size in dims.split(",") if size]
        if len(sizes) >= 2:
            sizes[-2:] = -(-sizes[-2] // 8) * 8, -(-sizes[-1] // 128) * 128
        bits = re.search(r"\d+", dtype)
        return math.prod(sizes) * (int(bits.group()) if bits else 8) // 8


@dataclasses.dataclass(frozen=True)
class Program:
    """The bundles of one op.

    entry: its line of HLO. operands: by the register that holds their address.
    core_ids: registers that are loaded with the number of the core within its chip.
    steps: of a Pallas grid, 0 where the text does not say.
    """

    bundles: tuple[Bundle, ...]
    entry: str
    operands: dict[str, Operand]
    core_ids: frozenset[str]
    steps: int

    @property
    def arguments(self) -> list[str]:
        """The names of the HLO instructions that the op reads, in order."""
        inside = self.entry.partition("custom-call(")[2].partition(")")[0]
        return [name.strip().lstrip("%") for name in _COMMENT.sub("", inside).split(",")]


def physical(register: str) -> str:
    """`%s12_s3` to `s3`; a token of a unit, `%77`, is its own."""
    return register.split("_")[-1] if "_" in register else register


def parse(text: str) -> Program:
    """The program of a `*-final_bundles.txt`."""
    entry = re.search(r"entry bundle: (.*?)\*/", text, re.DOTALL)
    operands = {
        register: Operand(int(index), space, shape, kind)
        for register, space, shape, index, kind in _OPERAND.findall(text)
    }
    grids = [math.prod(map(int, re.findall(r"\d+", grid))) for grid in _BOUNDS.findall(text)]
    core_ids = frozenset(_CORE_ID.findall(text))
    static = [steps for steps in grids if steps < 1 << 30]  # a dynamic bound is a huge number
    text = _COMMENT.sub(lambda c: "@" + ",".join(_STARTS.findall(c.group())) + "@", text)
    marks = list(_BUNDLE.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    bundles = tuple(
        _bundle(text[mark.end() : end], mark.group(1).count(">"))
        for mark, end in zip(marks, ends, strict=True)
    )
    line = entry.group(1) if entry else ""
    return Program(bundles, line, operands, core_ids, max(static, default=0))


def _bundle(text: str, loop_depth: int) -> Bundle:
    regions = frozenset(r for found in _REGIONS.findall(text) for r in found.split(",") if r)
    text = _REGIONS.sub("", text)
    slots = text[text.index("{") + 1 : text.rindex("}")].split(";;")
    return Bundle(tuple(_instruction(s.strip()) for s in slots if s.strip()), loop_depth, regions)


def _instruction(text: str) -> Instruction:
    result, op, rest = _INSTRUCTION.match(text).groups()  # type: ignore[union-attr]
    found = _PREDICATE.search(rest)
    predicate = otherwise = None
    if found:
        negated, register, otherwise = found.groups()
        predicate = (register, negated == "!")
        rest = rest[: found.start()] + rest[found.end() :].lstrip(" ,")
    unit = re.search(r"\.(mxu\d|xlu\d)\b", op)
    return Instruction(
        result=result,
        op=op,
        args=() if op[0] == "v" else _arguments(op, _ATTRIBUTE.sub("", rest)),
        predicate=predicate,
        otherwise=otherwise,
        unit=unit.group(1) if unit else None,
        sources=tuple(physical(register) for register in re.findall(r"%\w+", rest)),
        packed=bool(re.search(r"\.(bf16|f8|s8)", op)),
    )


def _arguments(op: str, text: str) -> tuple[str, ...]:
    store = _STORE.match(text) if op.startswith("sst") else None
    if store:  # address and value have no comma between them
        return store.groups()
    return tuple(arg.strip() for arg in text.split(",") if arg.strip())
