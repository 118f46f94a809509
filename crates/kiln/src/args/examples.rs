//! What help texts say after the options: examples, and what concerns several options.

pub const EXAMPLES: &str = "\
Examples:
  kiln generate \"a red apple on a blue background\"
  kiln generate \"a red fox in the snow\" -m models/klein-4b
  kiln generate \"make it night\" -m models/klein-4b -r house.jpg -o night.png
  kiln generate --from night.png -S 7
  kiln pull klein-4b
  kiln serve
  kiln train images/ -m klein-base-4b -o me.safetensors --trigger \"sks dog\"
  kiln quantize models/klein-4b models/klein-4b-int8 --to int8
  kiln info models/klein-4b
  kiln config set model klein-4b
  kiln bench --peaks
  kiln doctor";

pub const GENERATE_EXAMPLES: &str = "\
Examples:
  kiln generate \"a red apple on a blue background\"                 (with Ember, the built-in model)
  kiln generate \"a red fox in the snow\" -m models/klein-4b -W 768 -H 512 -S 42
  kiln generate \"a red fox in the snow\" -m flux-2-klein-4b-Q4_K_M.gguf --text-encoder qwen_3_4b.safetensors
  kiln generate \"the same chair, in green\" -m models/klein-4b -r chair.jpg -r swatch.png
  kiln generate \"a round window\" -m models/klein-4b --init wall.png --mask mask.png
  kiln generate \"an owl\" -m models/klein-base -n \"blurry\" -g 4 --lora ink.safetensors:0.8
  kiln generate \"a fox\" \"a hen\" -m models/klein-4b -b 2 -o farm.png    (farm-1.png … farm-4.png)
  kiln generate \"a {red|blue} {fox|hen}\" -b 4 -o farm/                (four prompts, four files in farm/)
  kiln generate --prompt-file prompts.txt -o \"{number}-{prompt}-{seed}.jpg\" --quality 85
  echo \"a red fox\" | kiln generate - -m models/klein-4b -o - > fox.png
  kiln generate --from fox.png -W 512                               (the same again, but wider)";

pub const OTHER_NAMES: &str = "\
Names of other programs that work, too: -p, --prompt PROMPT; --negative-prompt (-n); --cfg-scale, --guidance-scale (-g);
--num-inference-steps (-s); --batch-count, --num-images-per-prompt (-b); --ref-image (-r); -i, --init-img, --init-image
(--init); --diffusion-model (--transformer); --llm (--text-encoder)";

pub const UPSCALE_EXAMPLES: &str = "\
The prompt helps the model to choose detail. Without one, that of the image's recipe is used, and the recipe's model
unless -m names another.

Examples:
  kiln upscale fox.png                                              (writes fox-2x.png)
  kiln upscale photo.jpg --scale 4 -m models/klein-4b -p \"a market square at dawn\" -o poster.png
  kiln upscale scan.png -m models/klein-4b --strength 0.2           (stays closer to the image)";

pub const TRAIN_EXAMPLES: &str = "\
Examples:
  kiln train images/ -m klein-base-4b -o me.safetensors --trigger \"sks dog\"
  kiln generate \"sks dog on the moon\" -m klein-4b --lora me.safetensors
  kiln train images/ -m klein-base-4b -o ink.safetensors --targets style --sample-every 250 --sample-model klein-4b
  kiln train edits/ -m klein-base-4b -o night.safetensors --reference-dropout 0.1    (edits/before, edits/after)
  kiln train images/ -m klein-base-4b -o me.safetensors --resume                 (continues, to the bit)
  kiln train images/ -m klein-base-4b -o me.safetensors --dry-run                (checks images, tells the cost)";

pub const BENCH_EXAMPLES: &str = "\
Examples:
  kiln bench                                         (klein 4B, 512x512, synthetic weights)
  kiln bench --synthetic 9b-kv --size 1024x1024 --refs 2 --dtype bf16
  kiln bench -m models/klein-4b --phase step --repeat 5 -v
  kiln bench --peaks                                 (the machine's peak rates)
  kiln bench --report report.json                    (this machine, to send in)

Every phase starts with a warm-up run that does not count. In the tables, `share` is the share of the phase's time,
`of peak` compares an operation's rate with the machine's peak, and `beyond weights` is the memory in use without the
weights.";

pub const PULL_EXAMPLES: &str = "\
Names: klein-4b, klein-9b, klein-base-4b, klein-base-9b, klein-9b-kv, with the suffix -fp8, -nvfp4 or -gguf where such a
repository exists; dev, dev-fp8, dev-nvfp4, dev-gguf:TYPE and dev-encoder; small-decoder; any OWNER/REPO.

Models are stored in the Hugging Face cache, which other programs share (HF_HOME, HF_HUB_CACHE). An interrupted download
resumes where it stopped. Gated models require the access token of an account that has accepted their terms, in HF_TOKEN
or from `huggingface-cli login`. A licence with conditions (dev, klein 9B) must be accepted here, too.
HF_ENDPOINT sets another hub or a mirror, with or without a path.

Examples:
  kiln pull klein-4b
  kiln generate \"a red fox in the snow\" -m klein-4b
  kiln pull klein-4b-gguf:Q4_K_M
  kiln pull dev-gguf:Q4_K_S --accept-license         (with the text encoder and the VAE that it lacks)
  kiln pull someone/some-style:*.safetensors";

pub const CONFIG_EXAMPLES: &str = "\
Settings: model, models_folder, output_folder, device, dtype, threads, vram_limit, cache; and serve.NAME, where NAME is any long
option of `kiln serve`, such as serve.port. An option comes before the environment (KILN_MODEL, KILN_MODELS), the
environment before the file, the file before what is built in.

Examples:
  kiln config                                        (every setting, and where its value comes from)
  kiln config set model klein-4b
  kiln config set output_folder ~/Pictures/kiln
  kiln config set serve.port 8080
  kiln config unset model";

pub const VERIFY_EXAMPLES: &str = "\
Trusted are signers of the authorities on C2PA's list, of --trust, and of `kiln credentials new` on this machine. Exit codes:
0 all files are trusted or valid; 1 one is invalid, or can't be checked; 2 one has no credentials, and none is invalid.
Nothing is asked of the network.

Examples:
  kiln verify fox.png
  kiln verify *.jpg --json
  kiln verify fox.png --trust studio.pem                            (the root that the studio hands out)";

pub const CONVERT_EXAMPLES: &str = "\
Examples:
  kiln convert models/klein-4b klein-4b.safetensors                  (one file, as for ComfyUI)
  kiln convert flux-2-klein-4b.safetensors transformer               (a folder, as for diffusers)
  kiln convert klein-4b-Q6_K.gguf klein-4b-bf16.safetensors --dtype bf16
  kiln convert models/klein-4b vae.safetensors --part vae --names diffusers";

pub const QUANTIZE_EXAMPLES: &str = "\
Quantizes the linear layers inside the blocks, copies everything else, and reports the error of each kind of layer.
With int8, `generate` computes in 8-bit integers (--dtype f32 or bf16 dequantizes them; --dtype int8 quantizes any model
for a single run). The other types stay packed in memory and are dequantized inside the matrix products.

Examples:
  kiln quantize models/klein-4b models/klein-4b-int8 --to int8
  kiln generate \"a red fox in the snow\" -m models/klein-4b-int8
  kiln quantize models/klein-4b klein-4b-Q4_K.gguf --to q4_k
  kiln quantize models/klein-4b qwen3-4b-Q6_K.gguf --to q6_k --part text-encoder
  kiln quantize flux-2-klein-4b.safetensors klein-4b-fp8.safetensors --to fp8";
