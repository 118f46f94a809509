//! Random ids and seeds.

/// A seed for a request without one: short enough to type.
pub(crate) fn random_seed() -> u64 {
    u32::from_be_bytes(random_bytes()).into()
}

/// Cryptographically secure random bytes.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Ids and sessions must not be guessable. The system's generator fails only in early boot.
    if getrandom::fill(&mut bytes).is_err() {
        std::process::abort();
    }
    bytes
}
