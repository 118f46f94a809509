//! FLUX.2's published models, and their licences.

use crate::{Alias, Companion, Licence};

/// The model with all components of FLUX.2 [dev].
const DEV: &str = "black-forest-labs/FLUX.2-dev";
/// ComfyUI's copy of its components, in one file each.
const COMFY: &str = "Comfy-Org/flux2-dev";

const DEV_LICENCE: Option<Licence> = Some(Licence {
    name: "FLUX.2 [dev] Non-Commercial License",
    url: "https://huggingface.co/black-forest-labs/FLUX.2-dev/blob/main/LICENSE.md",
});
const KLEIN_9B_LICENCE: Option<Licence> = Some(Licence {
    name: "FLUX Non-Commercial License",
    url: "https://huggingface.co/black-forest-labs/FLUX.2-klein-9B/blob/main/LICENSE.md",
});

const fn mistral(file: &'static str) -> Companion {
    Companion { repo: COMFY, file, alternatives: "split_files/text_encoders/mistral_3_small_flux2_*" }
}

const MISTRAL_FP8: &str = "split_files/text_encoders/mistral_3_small_flux2_fp8.safetensors";
const MISTRAL_FP4: &str = "split_files/text_encoders/mistral_3_small_flux2_fp4_mixed.safetensors";
const VAE_FILE: &str = "split_files/vae/flux2-vae.safetensors";
const VAE: Companion = Companion { repo: COMFY, file: VAE_FILE, alternatives: VAE_FILE };
const WITH_FP8: &[Companion] = &[mistral(MISTRAL_FP8), VAE];
const WITH_FP4: &[Companion] = &[mistral(MISTRAL_FP4), VAE];

const fn klein(name: &'static str, repo: &'static str) -> Alias {
    Alias { name, repo, file: None, is_component: false, companions: &[], whole: None, licence: None }
}

const fn klein_9b(name: &'static str, repo: &'static str) -> Alias {
    Alias { licence: KLEIN_9B_LICENCE, ..klein(name, repo) }
}

const fn dev(name: &'static str, repo: &'static str, companions: &'static [Companion]) -> Alias {
    Alias { companions, whole: Some(DEV), licence: DEV_LICENCE, ..klein(name, repo) }
}

/// The published models.
pub(super) static MODELS: [Alias; 22] = [
    klein("klein-4b", "black-forest-labs/FLUX.2-klein-4B"),
    klein_9b("klein-9b", "black-forest-labs/FLUX.2-klein-9B"),
    klein("klein-base-4b", "black-forest-labs/FLUX.2-klein-base-4B"),
    klein_9b("klein-base-9b", "black-forest-labs/FLUX.2-klein-base-9B"),
    klein_9b("klein-9b-kv", "black-forest-labs/FLUX.2-klein-9b-kv"),
    klein("klein-4b-fp8", "black-forest-labs/FLUX.2-klein-4b-fp8"),
    klein_9b("klein-9b-fp8", "black-forest-labs/FLUX.2-klein-9b-fp8"),
    klein("klein-base-4b-fp8", "black-forest-labs/FLUX.2-klein-base-4b-fp8"),
    klein_9b("klein-base-9b-fp8", "black-forest-labs/FLUX.2-klein-base-9b-fp8"),
    klein_9b("klein-9b-kv-fp8", "black-forest-labs/FLUX.2-klein-9b-kv-fp8"),
    klein("klein-4b-nvfp4", "black-forest-labs/FLUX.2-klein-4b-nvfp4"),
    klein_9b("klein-9b-nvfp4", "black-forest-labs/FLUX.2-klein-9b-nvfp4"),
    klein("klein-4b-gguf", "unsloth/FLUX.2-klein-4B-GGUF"),
    klein_9b("klein-9b-gguf", "unsloth/FLUX.2-klein-9B-GGUF"),
    klein("klein-base-4b-gguf", "unsloth/FLUX.2-klein-base-4B-GGUF"),
    klein_9b("klein-base-9b-gguf", "unsloth/FLUX.2-klein-base-9B-GGUF"),
    dev("dev", DEV, &[]),
    Alias {
        file: Some("split_files/diffusion_models/flux2_dev_fp8mixed.safetensors"),
        ..dev("dev-fp8", COMFY, WITH_FP8)
    },
    Alias {
        file: Some("flux2-dev-nvfp4.safetensors"),
        ..dev("dev-nvfp4", "black-forest-labs/FLUX.2-dev-NVFP4", WITH_FP4)
    },
    dev("dev-gguf", "city96/FLUX.2-dev-gguf", WITH_FP8),
    // The text encoder and the VAE alone, for a transformer from elsewhere.
    Alias { file: Some(MISTRAL_FP8), is_component: true, ..dev("dev-encoder", COMFY, &[VAE]) },
    Alias { is_component: true, ..klein("small-decoder", "black-forest-labs/FLUX.2-small-decoder") },
];
