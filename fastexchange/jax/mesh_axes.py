"""Meshes of devices: under ``jax.shard_map`` a value says by which axes of the mesh it differs between devices.

The results of a kernel differ by all axes by which an operand does. Under a mesh with explicit axes a value says how it is
distributed. A kernel gets whole arrays; a dimension of a result is distributed as one of the same name of an input.
"""

__all__ = ["as_varying", "axes_of", "distributed_as", "distributed_over", "sharding_of", "with_axes_of"]


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


def distributed_as(value, sharding):
    """A value that is distributed over explicit axes of a mesh as `sharding` says, what :func:`sharding_of` has returned."""
    own = sharding_of(value)
    if own == sharding:
        return value
    import jax

    whole = jax.sharding.PartitionSpec()
    return jax.sharding.reshard(value, jax.sharding.NamedSharding(own.mesh, whole) if sharding is None else sharding)


def sharding_of(value):
    """How a value is distributed over explicit axes of a mesh; None if it is not."""
    import jax

    known = getattr(jax.typeof(value), "sharding", None) if hasattr(jax, "typeof") else None
    return known if getattr(known, "spec", None) is not None and any(axis is not None for axis in known.spec) else None


def distributed_over(axes: list):
    """A sharding of which each dimension has a mesh and an axis of it, or None; None if no dimension has one."""
    import jax

    meshes = [each[0] for each in axes if each is not None]
    names = [None if each is None else each[1] for each in axes]
    used = [axis for name in names if name is not None for axis in (name if isinstance(name, tuple) else (name,))]
    if not meshes or len(set(used)) < len(used):
        return None
    return jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec(*names))


def with_axes_of(value, result):
    """The shape and dtype of a result that differs by the same axes as a value."""
    import jax

    known = jax.typeof(value)
    name = "manual_axis_type" if hasattr(known, "manual_axis_type") else "vma"
    sharding = jax.sharding.NamedSharding(known.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding, **{name: getattr(known, name)})
