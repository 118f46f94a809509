//! Where NVIDIA's libraries can't be.

/// Why this program loads none of NVIDIA's libraries on any machine, and what to use instead; `None` where it may.
pub const NO_NVIDIA: Option<&str> = if cfg!(target_os = "macos") {
    Some("macOS has no NVIDIA driver; use the CPU")
} else if cfg!(all(target_env = "musl", target_feature = "crt-static")) {
    Some(
        "this program is linked statically (musl) and can't load NVIDIA's driver; use the program built for glibc, or the CPU",
    )
} else {
    None
};
