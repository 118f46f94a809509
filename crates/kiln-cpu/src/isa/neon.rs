//! Proof of the vectors of 64-bit ARM.

/// Proof of NEON, which every 64-bit ARM has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    pub fn detect() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
}
