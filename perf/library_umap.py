"""Tests of UMAP as its documentation uses it, for ``libraries.py``: what pip has of it comes without tests."""

import numpy as np
import pytest
import umap
from sklearn.datasets import load_iris
from sklearn.manifold import trustworthiness
from umap.distances import named_distances, pairwise_special_metric

X, SPECIES = load_iris(return_X_y=True)
X = np.unique(X, axis=0)  # no two are the same, which a neighbour search would have to tell apart
OPTIONS = {"n_neighbors": 10, "random_state": 42, "n_epochs": 50, "n_jobs": 1}


@pytest.fixture(scope="module")
def fitted():
    return umap.UMAP(**OPTIONS).fit(X[::2])


def test_neighbours_stay_neighbours(fitted):
    assert trustworthiness(X[::2], fitted.embedding_, n_neighbors=10) > 0.9


def test_it_repeats_itself(fitted):
    assert np.array_equal(umap.UMAP(**OPTIONS).fit_transform(X[::2]), fitted.embedding_)


def test_new_points(fitted):
    assert trustworthiness(X[1::2], fitted.transform(X[1::2]), n_neighbors=10) > 0.85


def test_back_to_points(fitted):
    assert fitted.inverse_transform(fitted.embedding_[:3]).shape == (3, X.shape[1])


@pytest.mark.parametrize("metric", ["manhattan", "cosine", "canberra", "chebyshev", "correlation"])
def test_metrics(metric):
    assert trustworthiness(X, umap.UMAP(metric=metric, **OPTIONS).fit_transform(X), n_neighbors=10, metric=metric) > 0.75


def test_with_labels():
    x, species = load_iris(return_X_y=True)
    embedded = umap.UMAP(**OPTIONS).fit_transform(x, y=species)
    own, others = embedded[species == 0], embedded[species != 0]
    assert np.linalg.norm(own - own.mean(0), axis=1).mean() < np.linalg.norm(others - own.mean(0), axis=1).mean()


def test_dense():
    embedded = umap.UMAP(densmap=True, **OPTIONS).fit_transform(X)
    assert np.isfinite(embedded).all()


def test_a_metric_of_ones_own():
    import numba

    @numba.njit
    def furthest(x, y):
        return np.max(np.abs(x - y))

    assert umap.UMAP(metric=furthest, **OPTIONS).fit_transform(X).shape == (len(X), 2)


@pytest.mark.parametrize("metric", ["euclidean", "manhattan", "chebyshev", "canberra", "braycurtis", "cosine", "correlation"])
def test_distances(metric):
    from scipy.spatial.distance import cdist

    scipys = {"manhattan": "cityblock"}.get(metric, metric)
    assert np.allclose(pairwise_special_metric(X[:9], metric=named_distances[metric]), cdist(X[:9], X[:9], scipys), atol=1e-6)
