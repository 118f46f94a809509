//! FLUX.2's variants.

use super::{FLUX2, MISTRAL, QWEN3};
use crate::{Guidance, Variant, VariantInfo};

/// klein.
pub const DISTILLED: Variant = Variant::new(&KLEIN);
/// klein base.
pub const BASE: Variant = Variant::new(&KLEIN_BASE);
/// klein KV.
pub const KV: Variant = Variant::new(&KLEIN_KV);
/// dev.
pub const DEV: Variant = Variant::new(&DEV_INFO);

pub(super) static KLEIN: VariantInfo = VariantInfo {
    family: &FLUX2,
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
    family: &FLUX2,
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
    family: &FLUX2,
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
    family: &FLUX2,
    name: "dev",
    title: "dev",
    summary: "dev: many steps, guidance is an input of the transformer",
    text_encoder: &MISTRAL,
    guidance: Guidance::Input(4.0),
    steps: 50,
    is_distilled: false,
    caches_references: false,
};
