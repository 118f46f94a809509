//! Values of options whose range or form clap's own parsers don't know.

/// Parses a whole number of at least `MIN`. The message is the same for negative numbers.
#[cfg(feature = "cli")]
pub(super) fn at_least<const MIN: u32>() -> clap::builder::ValueParser {
    clap::builder::ValueParser::new(|text: &str| match text.parse::<u64>() {
        Ok(n) if n >= MIN.into() => {
            u32::try_from(n).map_err(|_| format!("expected a whole number of at most {}", u32::MAX))
        }
        _ => Err(format!("expected a whole number of at least {MIN}")),
    })
}

/// Parses a threshold of the step cache. The error says what was expected.
pub fn cache_threshold(text: &str) -> Result<f32, String> {
    let threshold = text.parse().ok().filter(|threshold| (0.0..=1.0).contains(threshold));
    threshold.ok_or_else(|| "expected a number from 0 (off) to 1".into())
}

#[cfg(feature = "cli")]
pub(super) fn upscale_factor(text: &str) -> Result<u32, String> {
    match text {
        "2" => Ok(2),
        "4" => Ok(4),
        _ => Err("expected 2 or 4".into()),
    }
}

/// Parses a seed. `-1` becomes a random one, as in A1111 and stable-diffusion.cpp.
#[cfg(feature = "cli")]
pub(super) fn seed(text: &str) -> Result<u64, String> {
    if text == "-1" {
        return random_seed();
    }
    text.parse()
        .map_err(|_| format!("expected a whole number from 0 to {}, or -1 for a random seed", u64::MAX))
}

/// Returns a random seed of 32 bits, which is all that torch's CPU generator uses, and short enough to type.
pub(super) fn random_seed() -> Result<u64, String> {
    getrandom::u32().map(u64::from).map_err(|e| format!("the system gives no random numbers: {e}"))
}
