//! FLUX.2's variants.

use super::{MISTRAL, QWEN3};
use crate::{Guidance, VariantInfo};

pub(super) static KLEIN: VariantInfo = VariantInfo {
    name: "distilled",
    title: "klein (distilled)",
    summary: "klein: four steps, no guidance",
    text_encoder: &QWEN3,
    guidance: Guidance::None,
    steps: 4,
    is_distilled: true,
    caches_references: false,
};

pub(super) static KLEIN_BASE: VariantInfo = VariantInfo {
    name: "base",
    title: "klein base",
    summary: "klein base: many steps, classifier-free guidance",
    text_encoder: &QWEN3,
    guidance: Guidance::ClassifierFree(4.0),
    steps: 50,
    is_distilled: false,
    caches_references: false,
};

pub(super) static KLEIN_KV: VariantInfo = VariantInfo {
    name: "kv",
    title: "klein KV",
    summary: "klein KV: distilled, reference images computed once",
    text_encoder: &QWEN3,
    guidance: Guidance::None,
    steps: 4,
    is_distilled: true,
    caches_references: true,
};

pub(super) static DEV_INFO: VariantInfo = VariantInfo {
    name: "dev",
    title: "dev",
    summary: "dev: many steps, guidance is an input of the transformer",
    text_encoder: &MISTRAL,
    guidance: Guidance::Input(4.0),
    steps: 50,
    is_distilled: false,
    caches_references: false,
};
