"""Code is compared by the content of the user's files, and of those they import."""

import functools
import sys

import optax
import pytest

from meshwright.runtime import user_code
from meshwright.runtime.versions import own_code, users_code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    # Configs of other tests in this process have named modules as well.
    monkeypatch.setattr(user_code, "_own_roots", type(user_code._own_roots)())
    (tmp_path / "digest_helper.py").write_text("def norm(x): return x\n")
    (tmp_path / "digest_model.py").write_text(
        "import functools, numpy\nfrom digest_helper import norm\n"
        "class Model:\n    def call(self): return norm\n"
        "def loss(model): return 0\n"
    )
    yield tmp_path
    for name in ("digest_helper", "digest_model"):
        sys.modules.pop(name, None)


def test_the_users_files_count_with_what_they_import_and_libraries_do_not(folder):
    import digest_model

    model = digest_model.Model
    for given in (model, model(), model().call, functools.partial(digest_model.loss, 1)):
        assert set(users_code(given)) == {"digest_model", "digest_helper"}
    assert users_code(optax.adamw, None, len) == {}
    before = users_code(model)
    (folder / "digest_helper.py").write_text("def norm(x): return 2 * x\n")
    after = users_code(model)
    assert after["digest_helper"] != before["digest_helper"]
    assert after["digest_model"] == before["digest_model"]


def test_meshwright_itself_has_a_digest():
    assert len(own_code()) == 12
