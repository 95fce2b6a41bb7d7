"""The scalar unit of a core, executed exactly: registers, predicates, scalar memory, addresses.

Loops, branches and copies are decided here, so trip counts and the sizes of copies are those of the
chip. What a program reads and did not compute (scalar memory that nobody filled, results of the
vector units) is *unknown*: it reads as 0, and what follows from it is marked.
"""

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from .bundles import Instruction, Operand, Program, physical

Value = int | float
UNKNOWN = 0  # what an unknown value reads as; libtpu's own profiler takes the same
WORDS_PER_GRANULE = 8  # copies are counted in granules of 32 bytes

# Addresses are integers with a tag far above 32 bits. HBM counts in granules. VMEM counts in rows
# of 512 bytes and is shifted left by 4 on its way into a copy: an operand's index is then in the
# same place as that of an operand in HBM.
HBM = 1 << 60
_VMEM = 1 << 52
_ALLOCATION = 1 << 44
_TAGGED = 1 << 40
_INDEX = 40


def _wrap(x: Value) -> Value:
    """To a signed 32-bit integer; floats and tagged addresses are left alone."""
    if isinstance(x, float) or abs(x) >= _TAGGED:
        return x
    return ((int(x) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def unsigned(x: Value) -> Value:
    return x + (1 << 32) if isinstance(x, int) and x < 0 else x


def _on_bits(function: Callable[[int, int], int]) -> Callable[[Value, Value], Value]:
    return lambda a, b: function(int(unsigned(a)), int(unsigned(b)))


_BINARY: dict[str, Callable] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "scalar_lea": operator.add,
    "smin": min,
    "smax": max,
    "smulhi": _on_bits(lambda a, b: (a * b) >> 32),
    "sand": _on_bits(operator.and_),
    "sor": _on_bits(operator.or_),
    "sxor": _on_bits(operator.xor),
    "sshrl": _on_bits(lambda a, b: a >> (b & 31)),
    "sshll": lambda a, b: a << (b & 31),
    "sshra": lambda a, b: a >> (b & 31),
    "pand": lambda a, b: bool(a and b),
    "por": lambda a, b: bool(a or b),
    "pxor": lambda a, b: bool(a) != bool(b),
    "pnand": lambda a, b: not (a and b),
    "pnor": lambda a, b: not (a or b),
}


@functools.cache
def _registers(args: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(re.findall(r"%\w+", " ".join(args)))


@functools.cache
def _literal(text: str) -> Value:
    try:
        return _wrap(int(text.lstrip("$"), 0))
    except ValueError:
        return float(text) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text) else 0


@functools.cache
def _terms(address: str) -> tuple[str, ...]:
    """`[smem:[#allocation3 + %s7_s2]]` to its summands."""
    return tuple(x.strip() for x in re.sub(r"smem:|[\[\]]", "", address).split("+"))


class ScalarUnit:
    """`contents`: the words of the op's operands, by index, as memory holds them, where known."""

    def __init__(self, program: Program, contents: Mapping[int, Sequence[Value]]):
        self._operands, self._core_ids = program.operands, program.core_ids
        self._contents = contents
        self._registers: dict[str, Value] = {}
        self._physical: dict[str, tuple[Value, bool]] = {}
        self._unknown: set[str] = set()
        self._memory: dict[Value, tuple[Value, bool]] = {}
        self._symbols: dict[str, int] = {}

    def value(self, text: str) -> Value:
        """Of an argument: a register, an address, a symbol or a literal."""
        if text[0] == "%":
            return self._registers.get(text, UNKNOWN)
        if text[0] == "[":
            return sum(self.value(term) for term in _terms(text))
        if text[0] == "#":
            return _ALLOCATION + (self._symbols.setdefault(text, len(self._symbols) + 1) << 24)
        return _literal(text)

    def enabled(self, predicate: tuple[str, bool] | None) -> bool:
        if predicate is None:
            return True
        register, negated = predicate
        return bool(self._registers.get(register, UNKNOWN)) != negated

    def is_unknown(self, register: str) -> bool:
        return register in self._unknown

    def skip(self, i: Instruction) -> None:
        """An instruction whose predicate is off."""
        if i.otherwise and i.result and i.predicate:
            unknown = i.otherwise in self._unknown or i.predicate[0] in self._unknown
            self._set(i.result, self.value(i.otherwise), unknown)

    def execute(self, i: Instruction) -> None:
        base = i.op.split(".")[0]
        if base == "sst":
            address, source = i.args
            self._memory[self.value(address)] = self.value(source), source in self._unknown
            return
        value, unknown = self._compute(i, base)
        unknown |= any(register in self._unknown for register in _registers(i.args))
        unknown |= bool(i.otherwise and i.predicate and i.predicate[0] in self._unknown)
        self._set(i.result or "", value, unknown)

    def copy_in(self, source: Value, granules: Value, target: Value) -> None:
        """A copy of an operand to scalar memory; of what is not an operand nothing is known."""
        words: Sequence[Value] = ()
        first = 0
        if source >= _VMEM << 4:
            words = self._contents.get((int(source) >> _INDEX) & 0xFFFF, ())
            first = (int(source) & (_TAGGED - 1)) * WORDS_PER_GRANULE
        for k in range(int(granules) * WORDS_PER_GRANULE):
            known = first + k < len(words)
            self._memory[target + k] = (words[first + k], False) if known else (UNKNOWN, True)

    def _set(self, register: str, value: Value, unknown: bool) -> None:
        self._registers[register] = value
        self._physical[physical(register)] = value, unknown
        (self._unknown.add if unknown else self._unknown.discard)(register)

    def _compute(self, i: Instruction, base: str) -> tuple[Value, bool]:
        """The result, and whether it is unknown for a reason other than its arguments."""
        args = i.args
        if base == "sphi":  # what the physical register has come to hold on this path
            return self._physical.get(physical(i.result or ""), (UNKNOWN, True))
        if base == "sld" and i.result in self._core_ids:
            return 0, False  # the first core
        if base == "sld":
            return self._memory.get(self.value(args[0]), (UNKNOWN, True))
        if base == "inlined_call_operand":
            return self._operand(self._operands.get(i.result or ""))
        if base in ("scmp", "sc"):  # "sc": whether a subtraction borrows
            compare = getattr(operator, i.op.split(".")[1] if base == "scmp" else "lt")
            a, b = (self.value(arg) for arg in args[:2])
            return compare(*((unsigned(a), unsigned(b)) if ".u32" in i.op else (a, b))), False
        if base == "scalar_select":
            return self.value(args[1] if self.value(args[0].split()[0]) else args[2]), False
        if base in ("smov", "int_to_ptr", "pmov"):
            return self.value(args[0]), False
        if base == "pneg":
            return not self.value(args[0]), False
        if base in _BINARY and len(args) >= 2:
            value = _BINARY[base](self.value(args[0]), self.value(args[1]))
            return (value if base[0] == "p" else _wrap(value)), False
        return UNKNOWN, True

    def _operand(self, operand: Operand | None) -> tuple[Value, bool]:
        if operand is None:
            return UNKNOWN, True
        if operand.space.startswith("<"):  # a scalar, passed by value
            known = self._contents.get(operand.index)
            return (known[0], False) if known else (UNKNOWN, True)
        if operand.space == "hbm":
            return HBM + (operand.index << _INDEX), False
        return _VMEM + (operand.index << (_INDEX - 4)), False
