"""SplitMix64 against published words, and the random numbers made of it, bit for bit what they have always been."""

import torch

from dissensus.data.image_arithmetic import Draws, image_keys
from dissensus.methods.parts.comparison_spaces import normal_from_step
from dissensus.data.corruption.image_draws import Draws, image_keys
from dissensus.methods.parts.repulsion import normal_from_step
from dissensus.numerics.hashing import WEYL, as_signed, mix_bits, shift_right


def test_the_generator_is_splitmix64() -> None:
    # the first outputs for the seed 1234567, as widely published for this algorithm
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    ours = mix_bits(1234567 + torch.arange(1, 6) * WEYL)
    assert [word % 2**64 for word in ours.tolist()] == known


def test_a_word_is_not_changed_where_it_lies() -> None:
    words = torch.tensor([-1, 7])
    mix_bits(words)
    assert words.tolist() == [-1, 7]


def test_shifts_are_logical() -> None:
    assert shift_right(torch.tensor([-1]), 60).tolist() == [15]
    assert [as_signed(word) for word in (2**64 - 1, 2**63, 5)] == [-1, -(2**63), 5]


def test_vmap_gives_each_row_its_own_bits() -> None:
    words = torch.arange(6).reshape(2, 3)
    assert torch.equal(torch.func.vmap(mix_bits)(words), mix_bits(words))


def test_steps_and_images_have_the_numbers_they_always_had() -> None:
    noise = normal_from_step(torch.zeros(3, 2, dtype=torch.float64), torch.tensor(3))
    known = [
        1.3636668920516968,
        0.0416016653180122,
        -1.9225530624389648,
        -2.5790839195251465,
        1.5061448812484741,
        0.5193658471107483,
    ]
    torch.testing.assert_close(noise.flatten(), torch.tensor(known, dtype=torch.float64), rtol=0, atol=1e-5)
    uniform = Draws(image_keys(5, 2, torch.arange(4))).uniform(1, 3)
    torch.testing.assert_close(uniform.sum().item(), 5.717126131876382, rtol=0, atol=1e-12)
