//! The instruction sets that kernels are compiled for, and which of them this machine has.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::{Bf16, Dotprod, I8mm, Neon, NeonSet};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Amx, Avx2, Avx512};

use std::fmt;
use std::str::FromStr;

use kiln_ops::{Error, Result};

/// A set of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, vectorised by the compiler for the target's base instructions; runs everywhere.
    Portable,
    /// 64-bit ARM, which always has NEON.
    Neon,
    /// [`Isa::Neon`] with dot products of bytes, for int8.
    NeonDotprod,
    /// [`Isa::NeonDotprod`] with matrix products of bytes, for int8.
    NeonI8mm,
    /// [`Isa::NeonI8mm`] with matrix products of bf16.
    NeonBf16,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// [`Isa::Avx512`] with AMX tiles for products of bf16 and, where the processor can, int8. Linux only, where the kernel
    /// must permit a process to use them.
    Amx,
}

impl Isa {
    /// All sets that kernels are compiled for, on any machine.
    pub const ALL: [Isa; 8] = [
        Isa::Portable,
        Isa::Neon,
        Isa::NeonDotprod,
        Isa::NeonI8mm,
        Isa::NeonBf16,
        Isa::Avx2,
        Isa::Avx512,
        Isa::Amx,
    ];

    /// The sets that this machine has, slowest first; never empty.
    ///
    /// ```
    /// assert!(kiln_cpu::Isa::available().contains(&kiln_cpu::Isa::Portable));
    /// ```
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|&isa| Level::detect(isa).is_some()).collect()
    }

    /// The fastest set this machine has.
    pub fn best() -> Isa {
        Isa::available().pop().unwrap_or(Isa::Portable)
    }

    /// Whether it has instructions for products of bf16, which makes them much faster than those of f32.
    pub const fn multiplies_bf16(self) -> bool {
        matches!(self, Isa::Amx | Isa::NeonBf16)
    }

    /// Whether `a · b + c` is rounded once. Such sets give the same bits in f32, whatever the machine.
    pub const fn fuses_multiply_add(self) -> bool {
        !matches!(self, Isa::Portable) || cfg!(any(target_arch = "aarch64", target_feature = "fma"))
    }

    /// The name used in messages and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neon-dotprod",
            Isa::NeonI8mm => "neon-i8mm",
            Isa::NeonBf16 => "neon-bf16",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| Error::Device {
            backend: "cpu".into(),
            what: format!(
                "unknown instruction set `{name}`, expected {}",
                Isa::ALL.map(Isa::name).join(", ")
            ),
        })
    }
}

/// An instruction set with the token that proves that this machine has it.
#[derive(Clone, Copy)]
pub(crate) enum Level {
    Portable,
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
}

impl Level {
    pub fn detect(isa: Isa) -> Option<Level> {
        match isa {
            Isa::Portable => Some(Level::Portable),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Neon::detect(NeonSet::Base).map(Level::Neon),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => Neon::detect(NeonSet::Dotprod).map(Level::Neon),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => Neon::detect(NeonSet::I8mm).map(Level::Neon),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonBf16 => Neon::detect(NeonSet::Bf16).map(Level::Neon),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm | Isa::NeonBf16 => None,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect().map(Level::Avx2),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::detect().map(Level::Avx512),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Amx::detect().map(Level::Amx),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => None,
        }
    }

    /// The matrix instructions for bf16 in vectors, if it has them.
    #[cfg(target_arch = "aarch64")]
    pub fn bf16(self) -> Option<Bf16> {
        match self {
            Level::Neon(neon) => neon.bf16(),
            Level::Portable => None,
        }
    }

    pub fn isa(self) -> Isa {
        match self {
            Level::Portable => Isa::Portable,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(neon) => match neon.set() {
                NeonSet::Base => Isa::Neon,
                NeonSet::Dotprod => Isa::NeonDotprod,
                NeonSet::I8mm => Isa::NeonI8mm,
                NeonSet::Bf16 => Isa::NeonBf16,
            },
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Isa::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => Isa::Avx512,
            #[cfg(target_arch = "x86_64")]
            Level::Amx(_) => Isa::Amx,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        let refused = "sse9".parse::<Isa>().unwrap_err().to_string();
        assert_eq!(
            refused,
            "cpu: unknown instruction set `sse9`, expected portable, neon, neon-dotprod, neon-i8mm, neon-bf16, \
             avx2, avx512, amx"
        );
    }

    #[test]
    fn the_best_set_is_available() {
        assert!(Isa::available().contains(&Isa::best()));
    }
}
