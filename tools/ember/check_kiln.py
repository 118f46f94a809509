"""Compares Kiln with diffusers on the shipped file: `check_kiln.py KILN FILE OUT`.

Unpacks FILE into OUT with `unpack.py`, generates the same images with diffusers (f32, CPU) and with `KILN generate --dtype f32 -m FILE`
(several prompts and sizes, edits with one and two references), and prints how much latents and images differ. Exits with 1 if an image differs
by more than one level anywhere. Needs torch, diffusers, transformers, Pillow.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

LEVELS = 1
HERE = Path(__file__).resolve().parent
# prompt, width, height, seed, indices of earlier images used as references
CASES = (
    ("a red apple on a blue background", 256, 256, 1, ()),
    ("a 3d cat face on a purple background", 256, 256, 2, ()),
    ("Please draw a happy frog in front of a pink background, in 3d style.", 320, 192, 3, ()),
    ("a flat tree on a white background", 128, 128, 4, ()),
    ("the moon and a star on a navy background", 192, 320, 18446744073709551615, ()),
    ("make the background green", 256, 256, 5, (0,)),
    ("put the apple of image 1 onto the background of image 2", 256, 256, 6, (0, 1)),
    ("make it smaller", 256, 256, 7, (2,)),
    ("a 3d rocket on an orange to purple gradient background", 512, 512, 8, ()),
)


class Check:
    def __init__(self, kiln, file, out):
        self.kiln_program, self.file, self.out = kiln, file, out
        self.pipe = diffusers.Flux2KleinPipeline.from_pretrained(out / "folder", dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)

    def reference(self, number):
        return self.out / f"{number}-diffusers.png"

    def diffusers(self, number, prompt, width, height, seed, references):
        """Returns latents `[tokens, channels]` and the image."""
        seen = {}

        def keep(pipe, step, time, tensors):
            seen["latents"] = tensors["latents"]
            return tensors

        # torch accepts signed and unsigned 64-bit seeds
        image = self.pipe(
            prompt=prompt, width=width, height=height, num_inference_steps=4, guidance_scale=1.0, max_sequence_length=64,
            image=[Image.open(self.reference(r)).convert("RGB") for r in references] or None,
            generator=torch.Generator("cpu").manual_seed(seed), callback_on_step_end=keep,
        ).images[0]  # fmt: skip
        image.save(self.reference(number))
        return seen["latents"][0].double(), np.asarray(image, dtype=np.int32)

    def kiln(self, number, prompt, width, height, seed, references):
        picture, latents = self.out / f"{number}-kiln.png", self.out / f"{number}-kiln.safetensors"
        command = [self.kiln_program, "generate", prompt, "-m", self.file, "-W", width, "-H", height, "-S", seed, "--dtype", "f32", "-q", "-o", picture, "--latents-out", latents]
        for r in references:
            command += ["-r", self.reference(r)]
        subprocess.run([str(c) for c in command], check=True)
        return load_file(latents)["latents"][0].double(), np.asarray(Image.open(picture).convert("RGB"), dtype=np.int32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kiln")
    parser.add_argument("file")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    for noisy in (diffusers.logging, transformers.logging):
        noisy.set_verbosity_error()
        noisy.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, HERE / "unpack.py", args.file, args.out / "folder"], check=True)
    check, failed = Check(args.kiln, args.file, args.out), 0
    for number, (prompt, width, height, seed, references) in enumerate(CASES):
        theirs, ours = (make(number, prompt, width, height, seed, references) for make in (check.diffusers, check.kiln))
        apart = np.abs(ours[1] - theirs[1])
        failed += apart.max() > LEVELS
        relative = float((ours[0] - theirs[0]).norm() / theirs[0].norm())
        print(
            f"{'ok' if apart.max() <= LEVELS else 'FAIL':4}  latents {relative:.1e}  pixels at most {apart.max()}, {100 * (apart > 0).mean():.3f} % differ"
            f"  {width}x{height}, {len(references)} references: {prompt}", flush=True,
        )  # fmt: skip
    print(f"{len(CASES) - failed} of {len(CASES)} agree within {LEVELS} level")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
