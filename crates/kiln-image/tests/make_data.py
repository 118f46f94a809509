"""Makes the files in data/: small images in awkward formats, and the results of Pillow and diffusers.

usage: make_data.py        (written with Pillow 13.0.0, diffusers 0.42.1, torch 2.15.0, numpy, opencv 4,
                            invisible-watermark 0.2.0)

The images are computed from a formula, `pattern`, which the tests compute too. Files are named after what
is odd about them. `golden.txt` has one case per line, its fields are explained beside the code that writes them.
"""

import hashlib
import math
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import torch
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.utils import load_image
from PIL import Image
from PIL.PngImagePlugin import PngInfo

DATA = Path(__file__).parent / "data"
EXPECTED = DATA / "expected"
EXPECTED.mkdir(parents=True, exist_ok=True)
lines = []


def sha(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def pattern(width, height, channels):
    y, x, c = np.mgrid[0:height, 0:width, 0:channels]
    v = x * x * 7 + y * 13 + x * y * 3 + c * 85 + ((x // 5 ^ y // 3) & 1) * 96
    return (v & 255).astype(np.uint8)


def disc(width, height, cx, cy, radius):
    """A white disc with a grey rim, on black."""
    y, x = np.mgrid[0:height, 0:width]
    d = (x - cx) ** 2 + (y - cy) ** 2
    return np.where(d <= radius**2, 255, np.where(d <= (radius + 1) ** 2, 100, 0)).astype(np.uint8)


def to_image(array):
    return Image.fromarray(array if array.ndim == 2 or array.shape[2] > 1 else array[..., 0])


# ---------------------------------------------------------------------------------------------------------- files
WIDTH, HEIGHT = 45, 31
smooth = to_image(pattern(9, 6, 3)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
gray = smooth.convert("L")
alpha = Image.linear_gradient("L").resize((WIDTH, HEIGHT))
rgba = smooth.copy()
rgba.putalpha(alpha)


def deep_png(name, array, color):
    """Sixteen bits per sample, which Pillow can't write in colour."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    (DATA / name).write_bytes(b"\x89PNG\r\n\x1a\n" + body)


smooth.save(DATA / "rgb.png", optimize=True)
rgba.save(DATA / "rgba.png", optimize=True)
Image.merge("LA", (gray, alpha)).save(DATA / "gray_alpha.png", optimize=True)
gray.save(DATA / "gray.png", optimize=True)
gray.convert("1").save(DATA / "one_bit.png", optimize=True)
smooth.quantize(16).save(DATA / "palette_transparent.png", transparency=3, optimize=True)
smooth.quantize(16).save(DATA / "palette_transparent.gif", transparency=3)
smooth.save(DATA / "rgb.bmp")
smooth.save(DATA / "lzw.tif", compression="tiff_lzw")
rgba.save(DATA / "rgba_lossless.webp", lossless=True, exact=True)
smooth.save(DATA / "lossy.webp", quality=80)
gray.save(DATA / "gray.jpg", quality=90)
smooth.save(DATA / "full_color.jpg", quality=90, subsampling=0)
smooth.save(DATA / "half_color.jpg", quality=85, subsampling=2)
smooth.save(DATA / "progressive.jpg", quality=85, subsampling=2, progressive=True)
smooth.convert("CMYK").save(DATA / "cmyk.jpg", quality=90)
for orientation in range(2, 9):
    exif = Image.Exif()
    exif[0x0112] = orientation
    smooth.save(DATA / f"exif_{orientation}.jpg", quality=75, subsampling=0, exif=exif)
    if orientation == 6:
        smooth.save(DATA / "exif_6.png", exif=exif, optimize=True)
        smooth.save(DATA / "exif_6.webp", exif=exif, lossless=True)
xmp = PngInfo()
xmp.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="8"/>')
smooth.save(DATA / "xmp_8.png", pnginfo=xmp, optimize=True)

dither = np.arange(WIDTH * HEIGHT).reshape(HEIGHT, WIDTH, 1) % 257 - 128
deep = np.clip(np.asarray(rgba).astype(int) * 257 + dither, 0, 65535)
deep_png("gray_16.png", deep[..., :1], 0)
deep_png("rgb_16.png", deep[..., :3], 2)
deep_png("rgba_16.png", deep, 6)

# decode NAME WIDTH HEIGHT SHA256 LUMA-SHA256 where decoding is exact; for JPEG, the decoded image is a file.
for file in sorted(f for f in DATA.iterdir() if f.is_file() and f.name != "golden.txt"):
    if file.name.endswith("_16.png"):  # scaled, where Pillow clips or cuts
        rgb = np.broadcast_to((deep if "rgb" in file.name else deep[..., :1]), deep.shape)[..., :3]
        decoded = Image.fromarray(((rgb + 128) // 257).astype(np.uint8))
    else:
        decoded = load_image(str(file))
    if file.suffix == ".jpg":
        decoded.save(EXPECTED / (file.name + ".png"), optimize=True)
    else:
        size = f"{decoded.width} {decoded.height}"
        lines.append(f"decode {file.name} {size} {sha(np.asarray(decoded))} {sha(np.asarray(decoded.convert('L')))}")

# ---------------------------------------------------------------------------------------------------------- resize
# resize FILTER CHANNELS WIDTH HEIGHT NEW-WIDTH NEW-HEIGHT SHA256, of the pattern
FILTERS = {"lanczos": Image.Resampling.LANCZOS, "bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
SIZES = [
    (64, 48, 32, 24), (64, 48, 200, 150), (33, 57, 33, 20), (57, 33, 20, 33), (40, 254, 199, 233),
    (148, 233, 137, 192), (300, 20, 7, 90), (1, 1, 5, 3), (5, 3, 1, 1), (2, 300, 2, 7), (1301, 977, 1184, 885), (977, 1301, 885, 400),
]  # fmt: skip
for name, resample in FILTERS.items():
    for width, height, new_width, new_height in SIZES:
        for channels in (1, 3) if width < 400 else (3,):
            out = to_image(pattern(width, height, channels)).resize((new_width, new_height), resample)
            lines.append(f"resize {name} {channels} {width} {height} {new_width} {new_height} {sha(np.asarray(out))}")

# ------------------------------------------------------------------------------------------------------- reference
# reference WIDTH HEIGHT NEW-WIDTH NEW-HEIGHT SHA256
images = Flux2ImageProcessor(vae_scale_factor=16, vae_latent_channels=32)
masks = Flux2ImageProcessor(
    vae_scale_factor=16, vae_latent_channels=32, do_normalize=False, do_binarize=True, do_convert_rgb=False, do_convert_grayscale=True,
)  # fmt: skip


def to_bytes(tensor):
    return ((tensor[0].permute(1, 2, 0).numpy() + 1) / 2 * 255).round().astype(np.uint8)


for width, height in [(64, 64), (101, 79), (80, 640), (1024, 1024), (1025, 1024), (1400, 1001), (700, 3001)]:
    image = to_image(pattern(width, height, 3))
    images.check_image_input(image)
    image = images._resize_if_exceeds_area(image)
    w, h = image.width // 16 * 16, image.height // 16 * 16
    out = to_bytes(images.preprocess(image, height=h, width=w, resize_mode="crop"))
    lines.append(f"reference {width} {height} {w} {h} {sha(out)}")

# --------------------------------------------------------------------------------------------------------- inpaint
# inpaint WIDTH HEIGHT MASK-WIDTH MASK-HEIGHT CX CY RADIUS PADDING ->
#     WIDTH HEIGHT LEFT,TOP,RIGHT,BOTTOM SOURCE-SHA256 TOKEN-MASK-SHA256 RESULT-WIDTH RESULT-HEIGHT RESULT-SHA256
# The generated image is replaced by the pattern of that size, upside down.
CASES = [
    (100, 72, 100, 72, 54, 36, 24, None), (100, 72, 37, 130, 20, 60, 15, None), (1300, 1000, 1300, 1000, 400, 500, 300, None),
    (100, 72, 100, 72, 61, 25, 12, 8), (100, 72, 100, 72, 4, 68, 3, 0), (90, 200, 90, 200, 45, 100, 30, 5),
    (200, 90, 200, 90, 190, 45, 40, 32), (64, 64, 64, 64, 32, 32, 60, 500), (120, 100, 120, 100, 60, 50, 0, 0), (51, 160, 51, 160, 25, 0, 8, 2),
    (160, 40, 160, 40, 30, 20, 5, 1), (300, 17, 300, 17, 150, 8, 2, 3),
]  # fmt: skip
for width, height, mask_width, mask_height, cx, cy, radius, padding in CASES:
    image = to_image(pattern(width, height, 3))
    mask = to_image(disc(mask_width, mask_height, cx, cy, radius))
    if width * height > 1024 * 1024:
        scale = math.sqrt(1024 * 1024 / (width * height))
        image = images.resize(image, int(height * scale), int(width * scale))
    w, h = image.width // 16 * 16, image.height // 16 * 16
    region = None if padding is None else masks.get_crop_region(mask, w, h, pad=padding)
    mode = "default" if padding is None else "fill"
    source = images.preprocess(image, h, w, crops_coords=region, resize_mode=mode)
    tokens = masks.preprocess(mask, height=h, width=w, resize_mode=mode, crops_coords=region)
    tokens = torch.nn.functional.interpolate(tokens, size=(h // 16, w // 16), mode="bilinear")
    result = to_image(pattern(w, h, 3)[::-1].copy())
    if region is not None:
        result = images.apply_overlay(mask, image, result, region)
    box = "-" if region is None else ",".join(map(str, region))
    given = f"{width} {height} {mask_width} {mask_height} {cx} {cy} {radius} {'-' if padding is None else padding}"
    made = f"{w} {h} {box} {sha(to_bytes(source))} {sha(tokens[0, 0].numpy())}"
    lines.append(f"inpaint {given} -> {made} {result.width} {result.height} {sha(np.asarray(result))}")

# ------------------------------------------------------------------------------------------------------- dwt_dct.webp
# The watermark of Black Forest Labs' own program, and the correlation of its bits with the blocks' (a test has it as a number).
from imwatermark import maxDct  # noqa: E402

bits = [int(bit) for bit in f"{0x2AFE879CF52E:046b}"]
y, x = np.mgrid[0:171, 0:230].astype(float)
colors = [120 + 80 * np.sin(x / 40) + 20 * np.cos(y / 23), 100 + 60 * np.cos((x + y) / 60), 90 + 70 * np.sin(y / 50 + 1)]
picture = np.stack(colors, -1)
picture[(x - 90) ** 2 + (y - 80) ** 2 < 35**2] = [230, 180, 40]
marked = maxDct.EmbedMaxDct(bits, wmLen=46).encode(picture.astype(np.uint8)[:, :, ::-1].copy())
Image.fromarray(marked[:, :, ::-1]).save(DATA / "dwt_dct.webp", lossless=True, quality=100, method=6)
u = cv2.cvtColor(marked, cv2.COLOR_BGR2YUV)[:168, :224, 1].astype(float)
sums = (u[0::2, 0::2] + u[0::2, 1::2] + u[1::2, 0::2] + u[1::2, 1::2]) / 2
blocks = sums.reshape(21, 4, 28, 4).transpose(0, 2, 1, 3).reshape(-1, 16)
says = np.abs(blocks[:, 1:]).max(1) % 36 > 18
shares = [says[bit::46].mean() for bit in range(46)]
print("dwt_dct.webp:", np.corrcoef(shares, bits)[0, 1])

(DATA / "golden.txt").write_text("# made by make_data.py; exact, no tolerance\n" + "\n".join(lines) + "\n")
