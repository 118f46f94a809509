"""Tests `kiln serve` with LiteLLM, which many gateways use.

Usage: litellm_client.py http://127.0.0.1:7860 [KEY]
"""

import base64
import io
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download
import litellm
from PIL import Image

address, key = sys.argv[1], (sys.argv + ["none"])[2]
options = dict(api_base=f"{address}/v1", api_key=key)

response = litellm.image_generation(model="openai/gpt-image-1", prompt="a red apple", n=2, size="64x64", **options)
sizes = [Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))).size for image in response.data]
assert sizes == [(64, 64)] * 2, sizes

try:
    litellm.image_generation(model="openai/no-such-model", prompt="a red apple", **options)
    raise SystemExit("an unknown model was accepted")
except litellm.exceptions.NotFoundError as error:
    assert "no-such-model" in str(error), error

print("litellm client: passed")
