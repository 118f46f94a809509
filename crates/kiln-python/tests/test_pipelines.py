"""The pipelines: arguments and meanings of diffusers', and what is refused."""

import pickle

import kiln
import numpy as np
from common import path, pipeline, raises
from PIL import Image

CALL = {"prompt": "a fox", "height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 32}


def klein():
    return pipeline("Flux2KleinPipeline", "klein")


def same(a, b):
    return (np.asarray(a) == np.asarray(b)).all()


def test_outputs_in_every_type():
    [image] = klein()(generator=1, **CALL).images
    assert isinstance(image, Image.Image) and image.size == (64, 64)
    array = klein()(generator=1, output_type="np", **CALL).images
    assert array.shape == (1, 64, 64, 3) and array.dtype == np.float32
    assert same((array[0] * 255).round().astype(np.uint8), image)
    latents = klein()(generator=1, output_type="latent", **CALL).images
    assert latents.shape == (1, 32, 8, 8) and latents.dtype == np.float32
    (images,) = klein()(generator=1, return_dict=False, **CALL)
    assert same(images[0], image)
    output = klein()(generator=1, **CALL)
    assert same(output[0][0], image) and same(output["images"][0], image) and len(output.to_tuple()) == 1
    raises(ValueError, "output_type", klein(), output_type="jpeg", **CALL)


def test_generators():
    one = klein()(generator=5, num_images_per_prompt=2, **CALL).images
    first = klein()(generator=[5], **CALL).images[0]
    assert same(one[0], first) and not same(one[1], first)
    two = klein()(generator=[5, 6], num_images_per_prompt=2, **CALL).images
    assert same(two[0], first) and not same(two[1], one[1])
    raises(ValueError, "effective batch", klein(), generator=[1, 2, 3], **CALL)
    raises(TypeError, "generator", klein(), generator="7", **CALL)
    raises(TypeError, "generator", klein(), generator=True, **CALL)
    assert not same(klein()(**CALL).images[0], klein()(**CALL).images[0])
    assert same(klein()(generator=np.int64(5), **CALL).images[0], first)


def test_prompts_and_embeddings():
    pipe = klein()
    [image] = pipe(generator=1, **CALL).images
    embeds, ids = pipe.encode_prompt("a fox", max_sequence_length=32, num_images_per_prompt=2)
    assert embeds.shape[:2] == (2, 32) and ids.shape == (2, 32, 4) and (ids[0, :, 3] == np.arange(32)).all()
    call = {name: value for name, value in CALL.items() if name not in ("prompt", "max_sequence_length")}
    [given] = pipe(prompt_embeds=embeds[:1], generator=1, **call).images
    assert same(given, image)
    raises(ValueError, "not both", pipe, prompt_embeds=embeds, **CALL)
    raises(ValueError, "either", pipe)
    raises(ValueError, "`prompt` has to be", pipe, prompt=7)
    assert same(pipe("a fox", generator=1, **{k: v for k, v in CALL.items() if k != "prompt"}).images[0], image)


def test_negative_prompts_as_text_and_as_embeddings():
    pipe = pipeline("Flux2KleinPipeline", "klein-base")
    call = {**CALL, "guidance_scale": 3.0, "generator": 1}
    plain = pipe(**call).images[0]
    text = pipe(negative_prompt="grey", **call).images[0]
    embeds, _ = pipe.encode_prompt("grey", max_sequence_length=32)
    given = pipe(negative_prompt_embeds=embeds, **call).images[0]
    assert same(text, given) and not same(text, plain)
    prompt, _ = pipe.encode_prompt("a fox", max_sequence_length=32)
    mixed = dict(call, prompt=None, prompt_embeds=prompt, max_sequence_length=32)
    assert same(pipe(negative_prompt="grey", **mixed).images[0], text)
    assert pipe.do_classifier_free_guidance


def test_callbacks():
    pipe, seen = klein(), []
    plain = pipe(generator=1, **CALL).images[0]

    def look(given, step, timestep, kwargs):
        assert given is pipe and pipe.num_timesteps == 2
        seen.append((step, float(timestep), {name: value.shape for name, value in kwargs.items()}))
        return kwargs

    inputs = ["latents", "prompt_embeds"]
    call = dict(CALL, generator=1, callback_on_step_end=look)
    assert same(pipe(callback_on_step_end_tensor_inputs=inputs, **call).images[0], plain)
    assert [step for step, _, _ in seen] == [0, 1] and seen[0][1] == 1000 and seen[0][2]["latents"] == (1, 16, 128)
    raises(ValueError, "has to be in", pipe, callback_on_step_end_tensor_inputs=["noise"], **call)

    zero = lambda pipe, step, timestep, kwargs: {"latents": kwargs["latents"] * 0}
    latents = pipe(**dict(call, callback_on_step_end=zero, output_type="latent")).images
    assert latents.std() < plain_latents(pipe).std()

    def interrupt(pipe, step, timestep, kwargs):
        seen.append(step)
        pipe._interrupt = True
        return kwargs

    seen.clear()
    pipe(**dict(call, callback_on_step_end=interrupt, num_inference_steps=50))
    assert seen == [0]
    raises(TypeError, "dict", pipe, **dict(call, callback_on_step_end=lambda *_: None))
    embeds = lambda pipe, step, timestep, kwargs: {"prompt_embeds": np.zeros(3)}
    raises(NotImplementedError, "prompt_embeds", pipe, **dict(call, callback_on_step_end=embeds))


def plain_latents(pipe):
    return pipe(generator=1, output_type="latent", **CALL).images


def test_latents_given_and_sigmas():
    noise = np.random.default_rng(0).standard_normal((2, 128, 4, 4)).astype(np.float32)
    both = klein()(latents=noise, num_images_per_prompt=2, **CALL).images
    one = klein()(latents=noise[1:], **CALL).images
    assert same(both[1], one[0])
    raises(kiln.RequestError, "shape", klein(), latents=noise[:, :, :3], **CALL)
    call = {name: value for name, value in CALL.items() if name != "num_inference_steps"}
    own = klein()(sigmas=[1.0, 0.5], generator=1, **call).images[0]
    fifty = klein()(sigmas=[1.0, 0.5], num_inference_steps=50, generator=1, **call).images[0]
    assert same(own, fifty)


def test_loras():
    pipe = kiln.Flux2KleinPipeline.from_pretrained(path("klein"), torch_dtype="f32", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    import os

    file = os.path.join(os.environ["KILN_TESTDATA"], "tiny/lora/lora_diffusers.safetensors")
    plain = pipe(generator=1, **CALL).images[0]
    pipe.load_lora_weights(file, adapter_name="ink")
    full = pipe(generator=1, **CALL).images[0]
    assert not same(full, plain) and pipe.get_active_adapters() == ["ink"]
    pipe.set_adapters("ink", 0.5)
    half = pipe(generator=1, **CALL).images[0]
    assert not same(half, full) and not same(half, plain)
    pipe.disable_lora()
    assert same(pipe(generator=1, **CALL).images[0], plain)
    pipe.enable_lora()
    again = pickle.loads(pickle.dumps(pipe))
    again.set_progress_bar_config(disable=True)
    assert same(again(generator=1, **CALL).images[0], half)
    raises(ValueError, "no adapter", pipe.set_adapters, "other")
    raises(ValueError, "already", pipe.load_lora_weights, file, adapter_name="ink")
    raises(NotImplementedError, "fuse", pipe.fuse_lora)
    raises(FileNotFoundError, "no LoRA", pipe.load_lora_weights, "no/such")
    pipe.unload_lora_weights()
    assert same(pipe(generator=1, **CALL).images[0], plain) and pipe.get_list_adapters() == {}


def test_inpainting_is_checked():
    pipe = pipeline("Flux2KleinInpaintPipeline", "klein")
    image, mask = Image.new("RGB", (64, 64), "red"), Image.new("L", (64, 64), 255)
    call = dict(prompt="a fox", num_inference_steps=2, max_sequence_length=32, generator=1)
    assert pipe(image=image, mask_image=mask, **call).images[0].size == (64, 64)
    arrays = pipe(image=np.asarray(image), mask_image=np.asarray(mask), **call).images[0]
    assert same(arrays, pipe(image=image, mask_image=mask, **call).images[0])
    raises(ValueError, "`image`", pipe, mask_image=mask, **call)
    raises(ValueError, "`mask_image`", pipe, image=image, **call)
    raises(ValueError, "strength", pipe, image=image, mask_image=mask, strength=0, **call)
    raises(NotImplementedError, "one image", pipe, image=[image, image], mask_image=mask, **call)
    raises(
        ValueError, "PIL", pipe, image=np.asarray(image), mask_image=mask, padding_mask_crop=4, **call
    )


def test_captions_are_upsampled():
    pipe = pipeline("Flux2Pipeline", "dev-text")
    [text] = pipe.upsample_prompt("a fox")
    assert isinstance(text, str) and text != "a fox"
    call = dict(CALL, num_inference_steps=1, generator=1)
    upsampled = pipe(**dict(call, caption_upsample_temperature=0.15)).images[0]
    assert same(upsampled, pipe(**dict(call, prompt=text)).images[0])
    raises(kiln.RequestError, "temperature", pipe.upsample_prompt, "a fox", temperature=99)
    raises(kiln.KilnError, "", klein().model.upsample_prompt, "a fox")


def test_what_is_not_supported_says_so():
    opened = kiln.Flux2KleinPipeline.from_pretrained
    raises(NotImplementedError, "float16", opened, path("klein"), torch_dtype="torch.float16")
    raises(NotImplementedError, "revision", opened, path("klein"), revision="main")
    raises(NotImplementedError, "vae", opened, path("klein"), vae=object())
    raises(ValueError, "Flux2KleinKVPipeline", opened, path("klein-kv"))
    raises(ValueError, "Flux2KleinPipeline", kiln.Flux2Pipeline.from_pretrained, path("klein"))
    raises(kiln.ModelError, "no-such", opened, "no-such")
    raises(NotImplementedError, "attention_kwargs", klein(), attention_kwargs={"scale": 1}, **CALL)
    raises(NotImplementedError, "'mps'", klein().to, "mps")
    raises(AttributeError, "'vae'", lambda: klein().vae)
    raises(TypeError, "unexpected", klein(), clip_skip=2, **CALL)
    raises(NotImplementedError, "", klein().save_pretrained, "out")
    assert klein().to("cpu") is klein() and klein().device == "cpu" and klein().dtype == "f32"
    moved = kiln.Flux2KleinPipeline.from_pretrained(path("klein"), device="cpu").to(dtype="bf16")
    assert moved.model._settings["dtype"] == "bf16"
    moved.enable_model_cpu_offload()
    assert moved.device == "auto"
