"""What others have registered with Numba is in every key: compiled code uses it without a name."""

import importlib

import numba
import pytest
from numba import types
from numba.core.typeconv import Conversion
from numba.core.typeconv.rules import default_casting_rules
from numba.extending import intrinsic, make_attribute_wrapper, models, overload_attribute, register_model
from test_dependencies import digest

from fastexchange.ground.numba_extensions import conversions, extensions

TYPE = """
import sys
from numba import extending, types
from numba.core import imputils, rewrites
from numba.core.registry import cpu_target
from numba.core.typing import templates
from numba.extending import register_model

class Kind(types.Type):
    def __init__(self): super().__init__("kind of the test")
class Object: pass
LIMIT = 1
"""
REGISTERED = {
    "a getattr": "@imputils.lower_getattr(types.Array, 'zork')\ndef lowered(context, builder, typ, value): return LIMIT",
    "any getattr": "@imputils.lower_getattr_generic(Kind)\ndef lowered(context, builder, typ, value, attr): return LIMIT",
    "a setattr": "@imputils.lower_setattr(Kind, 'zork')\ndef lowered(context, builder, sig, args): return LIMIT",
    "a cast": "@imputils.lower_cast(Kind, types.Array)\ndef lowered(context, builder, fromty, toty, val): return LIMIT",
    "a constant": "@imputils.lower_constant(Kind)\ndef lowered(context, builder, ty, pyval): return LIMIT",
    "a function": "@imputils.lower_builtin('zork', Kind)\ndef lowered(context, builder, sig, args): return LIMIT",
    "a box": "@extending.box(Kind)\ndef boxed(typ, val, c): return LIMIT",
    "an unbox": "@extending.unbox(Kind)\ndef unboxed(typ, obj, c): return LIMIT",
    "a reflector": "@extending.reflect(Kind)\ndef reflected(typ, val, c): return LIMIT",
    "a model": "@extending.register_model(Kind)\nclass Model(extending.models.OpaqueModel):\n  def size(self): return LIMIT",
    "a type": "Kind.can_convert_to = lambda *given: LIMIT\nregister_model(Kind)(extending.models.OpaqueModel)",
    "a property of a type": "Kind.key = property(lambda self: LIMIT)\nregister_model(Kind)(extending.models.OpaqueModel)",
    "a type of values": "@extending.typeof_impl.register(Object)\ndef typed(value, context): return LIMIT",
    "a type of Python": "@extending.as_numba_type.register\ndef typed(given): return Kind() if LIMIT is given else None",
    "an attribute": "@templates.infer_getattr\nclass Zork(templates.AttributeTemplate):\n  key = Kind\n"
    "  def resolve_zork(self, typ): return LIMIT",
    "a base class": "class Base(templates.AttributeTemplate):\n  key = Kind\n  def resolve_zork(self, typ): return LIMIT\n"
    "templates.infer_getattr(type('Zork', (Base,), {'__module__': 'numba.nowhere'}))",
    "a global": "def stub(x): pass\nsys.modules[__name__].stub = stub\n@templates.infer_global(stub)\n"
    "class Zork(templates.AbstractTemplate):\n  def generic(self, args, kws): return LIMIT",
    "an overloaded attribute": "@extending.overload_attribute(Kind, 'zork')\ndef zork(x): return lambda x: LIMIT",
    "an overloaded method": "@extending.overload_method(types.Float, 'zork')\ndef zork(x): return lambda x: x + LIMIT",
    "an intrinsic": "@extending.intrinsic\ndef zork(context, x): return LIMIT",
    "a rewrite": "@rewrites.register_rewrite('before-inference')\nclass Zork(rewrites.Rewrite):\n"
    "  def match(self, *given): return not LIMIT",
    "a registry of one's own": "mine = imputils.Registry('mine')\n@mine.lower('zork', Kind)\n"
    "def lowered(context, builder, sig, args): return LIMIT\ncpu_target.target_context.install_registry(mine)",
}
@pytest.mark.parametrize("what", REGISTERED)
def test_what_is_registered(what, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"extension_{list(REGISTERED).index(what)}_of_the_test"
    (tmp_path / f"{name}.py").write_text(TYPE + REGISTERED[what])
    importlib.invalidate_caches()
    before = digest(1)
    module = importlib.import_module(name)
    found = [digest(1)]
    assert name in extensions()
    module.LIMIT = 2
    found.append(digest(1))
    module.LIMIT = 1
    assert before not in found and found[0] != found[1] and digest(1) == found[0]


def test_wrappers_of_attributes_and_conversions():
    """The type of one module, the names in another: the functions are Numba's."""

    class Kind(types.Opaque):
        pass

    register_model(Kind)(models.OpaqueModel)
    make_attribute_wrapper(Kind, "field of the test", "attribute of the test")
    parts = [part for item in extensions()[__name__] for part in item]
    assert "field of the test" in parts and "attribute of the test" in parts
    before = digest(1)
    assert conversions() == []
    default_casting_rules.safe(Kind("kind of the test"), types.float16)
    try:
        assert digest(1) != before and ("kind of the test", "float16", Conversion.safe.value) in conversions()
    finally:
        default_casting_rules._tg._forwards.pop(Kind("kind of the test"))
    assert digest(1) == before


def test_what_numba_registers_itself():
    """What an intrinsic returns, what calls an overloaded attribute, a jitclass's type: keys before and after are the same."""
    Kind = type("Kind", (types.Opaque,), {})
    register_model(Kind)(models.OpaqueModel)
    overload_attribute(Kind, "zork")(lambda x: lambda x: 40)

    @intrinsic
    def new(_typing_context):
        return Kind("kind with an attribute of the test")(), lambda context, *_: context.get_dummy_value()

    before = digest(1)
    assert numba.njit(lambda: new().zork)() == 40
    made = numba.experimental.jitclass([("x", types.int64)])(type("Made", (), {"__init__": lambda self: None}))
    assert isinstance(made, type) and digest(1) == before
