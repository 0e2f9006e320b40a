"""Maps of scenes: colours that are the classes', and a window where the unknown is."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from dissensus.plots import segmentation_maps
from thinning import often


def test_every_class_has_a_colour_of_its_own_and_so_have_void_and_unknown():
    labels = np.array([[*range(25), segmentation_maps.VOID, segmentation_maps.UNKNOWN]])
    colours = segmentation_maps.class_image(labels, 25)[0]
    assert len({tuple(each) for each in colours.tolist()}) == 27
    assert colours[-2].tolist() == [0, 0, 0]
    assert colours[-1].tolist() == [255, 0, 255]
    assert colours[3].tolist() == segmentation_maps.class_colours(4)[3].tolist()  # whatever the number of classes


def test_the_window_holds_most_of_the_mask():
    mask = np.zeros((30, 60), dtype=bool)
    mask[2:5, 3:6] = mask[20:28, 45:57] = True
    rows, columns = segmentation_maps.densest_window(mask)
    assert (rows.stop - rows.start, columns.stop - columns.start) == (10, 20)
    assert mask[rows, columns].sum() == 8 * 12
    assert segmentation_maps.densest_window(np.zeros((3, 3))) is None


@pytest.mark.parametrize("unknown", often([True], [False]))
def test_a_scene_has_a_row_for_every_method_and_pixels_where_they_were(unknown):
    truth = np.zeros((6, 9), dtype=int)
    truth[0], truth[4:, 6:] = segmentation_maps.VOID, segmentation_maps.UNKNOWN if unknown else 1
    image = np.arange(6 * 9 * 3, dtype=np.uint8).reshape(6, 9, 3)
    said = segmentation_maps.PixelMaps(np.abs(truth) % 2, np.full((6, 9), 0.5), np.zeros((6, 9)))
    figure = segmentation_maps.scene_figure(image, truth, {"map": said, "tradi": said}, classes=["road", "car"])
    FigureCanvasAgg(figure).draw()
    shown = {(axes.get_title(), i): axes.images[0].get_array() for i, axes in enumerate(figure.axes) if axes.images}
    assert len(shown) == (4 + 2 * 5 if unknown else 2 + 2 * 3)
    by_name = {name: pixels for (name, _), pixels in shown.items()}
    assert np.array_equal(by_name["image"], image)
    assert np.array_equal(by_name["truth"], segmentation_maps.class_image(truth, 2))
    if unknown:
        rows, columns = segmentation_maps.densest_window(truth == segmentation_maps.UNKNOWN)
        assert np.array_equal(by_name["image, enlarged"], image[rows, columns])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["road", "car", *(["unknown"] if unknown else []), "void"]
