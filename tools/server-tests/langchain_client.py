"""Tests `kiln serve --model-alias dall-e-3=ember` with LangChain's wrapper, which expects URLs.

Usage: langchain_client.py http://127.0.0.1:7860 [KEY]
"""

import io
import sys
import urllib.request

from langchain_community.utilities.dalle_image_generator import DallEAPIWrapper
from PIL import Image

address, key = sys.argv[1], (sys.argv + ["none"])[2]
wrapper = DallEAPIWrapper(model="dall-e-3", base_url=f"{address}/v1", api_key=key, size="64x64", n=2, max_retries=0)
urls = wrapper.run("a red apple").split("\n")
assert len(urls) == 2, urls
for url in urls:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    assert Image.open(io.BytesIO(urllib.request.urlopen(request).read())).size == (64, 64)

print("langchain client: passed")
