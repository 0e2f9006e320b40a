"""A saved folder is at every moment the old one or the new one."""

import json
import os
import threading

import pytest
import torch

import dissensus as ds
from dissensus.storage.folder import CONFIG, TENSORS
from saved_files import config_of, tamper

x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def mlp(hidden: int = 6) -> torch.nn.Module:
    return ds.nets.MLP(4, 3, hidden=(hidden,))


def test_the_file_alone_is_enough_and_config_json_is_its_copy(tmp_path):
    posterior = ds.DeepEnsemble([mlp(), mlp()])
    ds.save(posterior, tmp_path)
    copy = json.loads((tmp_path / CONFIG).read_text())
    assert config_of(tmp_path) == copy
    (tmp_path / CONFIG).write_text("scribbled over")
    assert torch.equal(ds.load(tmp_path).predict(x).member_means, posterior.predict(x).member_means)
    (tmp_path / CONFIG).unlink()
    assert torch.equal(ds.load(tmp_path).predict(x).member_means, posterior.predict(x).member_means)


def test_two_saves_of_one_posterior_are_the_same_bytes(tmp_path):
    posterior = ds.MAP(mlp())
    ds.save(posterior, tmp_path / "a")
    ds.save(posterior, tmp_path / "b")
    for name in (CONFIG, TENSORS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_between_the_renames_leaves_a_folder_that_can_be_read(tmp_path, monkeypatch, at):
    old, new = ds.DeepEnsemble([mlp(), mlp()]), ds.MAP(mlp(7))
    ds.save(old, tmp_path)
    calls, replace = [], os.replace

    def killed(*names):
        calls.append(names)
        if len(calls) == at:
            raise KeyboardInterrupt
        replace(*names)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        ds.save(new, tmp_path)
    expected = old if at == 1 else new
    loaded = ds.load(tmp_path)
    assert type(loaded) is type(expected)
    assert torch.equal(loaded.predict(x).member_means, expected.predict(x).member_means)


def test_whoever_reads_while_others_save_gets_the_old_or_the_new(tmp_path):
    posteriors = [ds.DeepEnsemble([mlp(width) for _ in range(members)]) for width, members in ((6, 2), (7, 3))]
    loader = [(x, torch.zeros(5, dtype=torch.int64))]
    expected = [posterior.predict(x).mean for posterior in posteriors]
    ds.save(posteriors[0], tmp_path)
    done, errors = threading.Event(), []

    def save() -> None:
        try:
            while not done.is_set():
                for posterior in posteriors:
                    ds.save(posterior, tmp_path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            for mean in (ds.load(tmp_path).predict(x).mean, ds.summarise(tmp_path, loader).mean):
                assert any(torch.allclose(mean, each) for each in expected)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert sorted(os.listdir(tmp_path)) == [CONFIG, TENSORS]


@pytest.mark.parametrize("members", [1, 4, 10**9])
def test_a_summary_does_not_believe_an_edited_number_of_members(tmp_path, members):
    ds.save(ds.DeepEnsemble([mlp(), mlp()]), tmp_path)
    tamper(tmp_path, "arguments.members", members)
    with pytest.raises(ValueError, match=rf"expected particles.own.* of shape \({members}, .*got \(2"):
        ds.summarise(tmp_path, [(x, torch.zeros(5, dtype=torch.int64))])
