"""Tasks of segmentations, run whole at their smallest size, on scenes written here."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from dissensus.bench.rows.dataset_rows import AUGMENTATIONS, standardised_batches
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run.jobs import bench, run_all
from dissensus.bench.run.prediction_splits import rows_to_show
from dissensus.bench.run.run import Run
from dissensus.bench.run.segment_images import read_picture, resize_picture, write_maps
from dissensus.bench.run.shared_training import can_share_training
from dissensus.bench.task.config import load_task, run_config
from dissensus.data import VOID, segmentation_folder
from small_scenes import write, write_camvid, write_scenes
from thinning import often

UNKNOWN = ["pedestrian", "bicyclist"]
CAMVID = {"name": "camvid", "unknown": UNKNOWN, "size": [24, 32]}


def test_unknown_classes_do_not_count_in_training_and_are_foreign_at_test_time(tmp_path):
    data = task_data(CAMVID | {"train": 3, "validation": 2, "test": 3}, str(write_camvid(tmp_path)))
    assert (data.kind, len(data.classes)) == ("segmentation", 9)
    assert (len(data.train.y), len(data.validation.y), len(data.test.y)) == (3, 2, 3)  # validation: of the set's own
    assert set(data.train.y.unique().tolist()) == {*range(9), VOID}
    foreign = data.ood["unknown"]
    assert torch.equal(foreign.x, data.test.x)  # the same images, though only some were chosen
    assert set(foreign.y.unique().tolist()) == {0, 1, VOID}
    assert bool((data.test.y[foreign.y == 1] == VOID).all())
    assert bool((data.test.y[foreign.y == 0] != VOID).all())


def test_all_validation_scenes_are_held_out_where_a_task_does_not_say_how_many(tmp_path):
    data = task_data(CAMVID, str(write_camvid(tmp_path)))
    assert (len(data.train.y), len(data.validation.y)) == (4, 4)
    assert "unknown" not in task_data({"name": "camvid"}, str(tmp_path)).ood


def test_any_folder_of_images_and_masks_is_a_set(tmp_path):
    splits = ("train", "val", "test")
    places = {split: (f"mine/{split}/{{:02d}}.jpg", f"mine/{split}-masks/{{:02d}}.png") for split in splits}
    write_scenes(tmp_path, places, [0, 1, 2, 7])
    own = {"images": "mine/{split}", "masks": "mine/{split}-masks", "classes": ["grass", "wall", "cat"], "void": 7}
    data = task_data({"name": "segmentation_folder", "unknown": ["cat"], **own}, str(tmp_path))
    assert data.classes == ("grass", "wall")
    assert set(data.ood["unknown"].y.unique().tolist()) == {0, 1, VOID}


def test_images_and_masks_are_augmented_alike(tmp_path):
    data = task_data(CAMVID, str(write_camvid(tmp_path)))
    augment = AUGMENTATIONS["segmentation"](scale=[1.0, 1.0])  # flips alone
    torch.manual_seed(0)
    loader = standardised_batches(data.train, data.standardiser, batch_size=4, augment=augment)
    (x, y), plain = next(iter(loader)), data.standardiser(data.train.x)
    flipped = [not torch.equal(y[i], data.train.y[i].long()) for i in range(4)]
    assert y.dtype == torch.int64
    assert 0 < sum(flipped) < 4
    for i, turned in enumerate(flipped):
        torch.testing.assert_close(x[i], plain[i].flip(2) if turned else plain[i], rtol=0, atol=1e-4)


def test_scenes_to_look_at_are_those_with_most_unknown_pixels_of_each_part_of_the_set():
    foreign = torch.zeros(9, 2, 2, dtype=torch.bool)
    foreign[1, 0] = foreign[4, 0, 0] = foreign[8] = True
    assert rows_to_show(foreign).tolist() == [1, 4, 8]
    assert rows_to_show(foreign[:2]).tolist() == [0, 1]


FEW = ["map", "tradi"]  # every posterior trains an ENet in tests/nets/test_nets.py


@pytest.mark.parametrize(
    "methods", [pytest.param(each, marks=pytest.mark.slow) for each in (FEW, None)], ids=["few", "all"]
)
def test_camvid_with_unknown_objects_runs_whole(tmp_path, methods):
    task = load_task("camvid-ood", size="smoke")
    results, _ = bench(task, methods=methods, out=tmp_path / "runs", source=str(write_camvid(tmp_path)))
    assert list(results.methods) == (methods or task.methods)
    wanted = {"accuracy", "nll", "ece", "aurc", "miou", "cost/train_seconds"}
    wanted |= {f"ood/unknown/{key}" for key in ("auroc", "aupr", "fpr95", "pooled_auroc", "ece_union", "total/auroc")}
    wanted |= {"iou/sky", "iou/car"}
    for (evaluation,) in results.methods.values():
        assert wanted <= evaluation.metrics.keys()
        assert evaluation.arrays["scenes/prediction"].shape == (3, 24, 32)
        assert max(each.numel() for each in evaluation.arrays.values()) <= 3 * 3 * 24 * 32  # no pixels but the maps'
    truth = results.methods["map"][0].arrays["scenes/truth"]
    assert set(truth.unique().tolist()) == {-2, -1, *range(9)}
    page = (tmp_path / "runs" / "report.html").read_text()
    for text in (
        "Where in the image is it certain?",
        "How does refusing uncertain inputs help?",
        "published 75.40",
        "published 14.60",
        "published 1,800",
    ):
        assert text in page
    assert [can_share_training(run_config(task, name, 0)) for name in task.methods] == [True] * 5 + [False] * 4
    stored = sum(path.stat().st_size for path in (tmp_path / "runs" / "map-seed0" / "predictions").iterdir())
    assert stored < 3e5


@pytest.mark.slow
def test_a_segmentation_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    """With a temperature, which is fitted on the validation scenes."""
    folder = str(write_camvid(tmp_path))
    task = load_task("camvid-ood", size="smoke", overrides=["training.temperature=true"])
    settings = {"methods": ["map"], "seeds": [0], "source": folder}
    _, (whole,) = run_all(task, out=tmp_path / "whole", **settings)
    monkeypatch.setattr(Run, "predict", lambda self, tell: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_all(task, out=tmp_path / "parts", **settings)
    monkeypatch.undo()
    _, (parts,) = run_all(task, out=tmp_path / "parts", **settings)
    same = {key: value for key, value in whole.metrics.items() if not key.startswith("cost/")}
    assert same == {key: parts.metrics[key] for key in same}
    facts = json.loads((tmp_path / "whole" / "map-seed0" / "training.json").read_text())
    assert whole.metrics["temperature"] == pytest.approx(facts["temperature"])


@pytest.mark.parametrize("run", often([False], [True]), ids=["read", "run"])
@pytest.mark.parametrize(("task", "places", "labels"), [
    (
        "streethazards",
        {
            split: (f"{archive}/images/{part}/t1/{{:02d}}.png", f"{archive}/annotations/{part}/t1/{{:02d}}.png")
            for split, (archive, part) in {
                "train": ("train", "training"),
                "val": ("train", "validation"),
                "test": ("test", "test"),
            }.items()
        },
        [*range(14), 14],
    ),
    (
        "bdd-anomaly",
        {
            split: (f"seg/images/{part}/{split}{{:02d}}.jpg", f"seg/labels/{part}/{split}{{:02d}}_train_id.png")
            for split, part in {"train": "train", "val": "val", "test": "train"}.items()
        },
        [0, 1, 2, 3, 10, 255, 18],
    ),
])  # fmt: skip
def test_the_other_scenes_run_on_small_folders(tmp_path, task, places, labels, run):
    for split, place in places.items():  # what is unknown is in test scenes alone
        write_scenes(tmp_path, {split: place}, labels if split == "test" else [*labels[:-1], labels[1]])
    loaded = load_task(task, size="smoke")
    data = task_data(run_config(loaded, "map", 0).data, str(tmp_path))
    assert set(data.ood["unknown"].y.unique().tolist()) >= {0, 1}
    assert load_task(task).settings["network"]["name"] == "PSPNet"
    if not run:
        return
    _, evaluations = run_all(loaded, methods=["map"], seeds=[0], out=tmp_path / "runs", source=str(tmp_path))
    for evaluation in evaluations:
        assert 0 <= evaluation.metrics["ood/unknown/auroc"] <= 1


def test_maps_of_a_users_own_image_are_written_in_its_size(tmp_path, command_line):
    task = load_task("camvid-ood", size="smoke")
    source = str(write_camvid(tmp_path))
    runs, _ = run_all(task, methods=["mc_dropout"], seeds=[0], out=tmp_path / "runs", source=source)
    image = tmp_path / "street.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 100, 3), dtype=np.uint8)).save(image)
    code, printed, _ = command_line("predict", str(runs[0].folder), str(image))
    assert code == 0
    names = {"classes", *(f"street-{each}" for each in ("prediction", "confidence", "total", "epistemic"))}
    written = {path.stem: path for path in (runs[0].folder / "maps").iterdir()}
    assert written.keys() == names
    assert {str(path) for path in written.values()} == set(printed.split())
    assert all(Image.open(path).size == (100, 60) for name, path in written.items() if name != "classes")
    with pytest.raises(FileNotFoundError, match=r"expected an image at .*gone.png, got none"):
        list(write_maps(runs[0], [tmp_path / "gone.png"], tmp_path))
    Image.open(image).save(image.with_suffix(".png"))
    with pytest.raises(ValueError, match=r"expected images of different names, got two called 'street'"):
        list(write_maps(runs[0], [image, image.with_suffix(".png")], tmp_path))


def test_a_users_own_image_is_made_smaller_as_those_of_training_were(tmp_path):
    write(tmp_path, "a/x.png", np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8))
    write(tmp_path, "b/x.png", np.zeros((60, 80), np.uint8))
    found = segmentation_folder(tmp_path / "a", tmp_path / "b", ["road", "sky"], size=(18, 24))
    assert torch.equal(resize_picture(read_picture(tmp_path / "a/x.png"), (18, 24)), found.images[0])


def test_a_photograph_stands_upright(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held upright
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=turned)
    assert np.array_equal(np.asarray(read_picture(tmp_path / "photo.png")), np.rot90(pixels, -1))
