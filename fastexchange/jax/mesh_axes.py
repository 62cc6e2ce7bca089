"""``jax.shard_map``: a value that differs between devices says by which axes of the mesh.

The results of a kernel differ by all axes by which an operand does.
"""

__all__ = ["as_varying", "axes_of", "with_axes_of"]


def axes_of(values) -> frozenset:
    """The axes of a mesh by which any of these values differs between devices."""
    return frozenset().union(*map(_axes, values))


def _axes(value) -> frozenset:
    import jax

    if not hasattr(jax, "typeof"):  # before JAX 0.6
        return frozenset()
    known = jax.typeof(value)
    kinds = getattr(known, "manual_axis_type", None)
    return (getattr(known, "vma", None) if kinds is None else kinds.varying) or frozenset()


def as_varying(value, axes: frozenset):
    """A value as one that differs by these axes. A gradient is summed over those that are added."""
    added = tuple(axes - _axes(value)) if axes else ()
    if not added:
        return value
    from jax import lax

    cast = getattr(lax, "pcast", None)  # from JAX 0.8 on
    return cast(value, added, to="varying") if cast is not None else lax.pvary(value, added)  # type: ignore[attr-defined]


def with_axes_of(value, result):
    """The shape and dtype of a result that differs by the same axes as a value."""
    import jax

    known = jax.typeof(value)
    name = "manual_axis_type" if hasattr(known, "manual_axis_type") else "vma"
    sharding = jax.sharding.NamedSharding(known.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding, **{name: getattr(known, name)})
