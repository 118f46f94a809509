"""A model of another family than FLUX.2: Pebble, which exists for the tests alone."""

from common import SMALL, model


def test_another_family_has_its_own_tokens_and_defaults():
    [image] = model("pebble").generate("a fox", **(SMALL | {"width": 40, "height": 24}))
    assert (image.width, image.height) == (40, 24)
    assert image.latents().shape == (5 * 3, 8)
    assert model("pebble").info["variant"] == "pebble"
    latents = model("pebble").encode_image(image.numpy())
    assert latents.shape == (1, 8, 3, 5)
    assert model("pebble").decode_latents(latents)[0].numpy().shape == (24, 40, 3)
