//! Proofs of the instruction sets of 64-bit ARM: whoever holds one may use the instructions.

use std::arch::is_aarch64_feature_detected as detected;

/// NEON with extensions. Each has those of the ones before it, as the processors do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NeonSet {
    Base,
    Dotprod,
    I8mm,
    Bf16,
}

/// Proof of NEON, and of the extensions of the set that was chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon {
    set: NeonSet,
}

impl Neon {
    pub fn detect(set: NeonSet) -> Option<Neon> {
        let found = detected!("neon")
            && match set {
                NeonSet::Base => true,
                NeonSet::Dotprod => detected!("dotprod"),
                NeonSet::I8mm => detected!("dotprod") && detected!("i8mm"),
                NeonSet::Bf16 => detected!("dotprod") && detected!("i8mm") && detected!("bf16"),
            };
        found.then_some(Neon { set })
    }

    pub fn set(self) -> NeonSet {
        self.set
    }

    pub fn dotprod(self) -> Option<Dotprod> {
        (self.set >= NeonSet::Dotprod).then_some(Dotprod { neon: self })
    }

    pub fn i8mm(self) -> Option<I8mm> {
        (self.set >= NeonSet::I8mm).then_some(I8mm { neon: self })
    }

    pub fn bf16(self) -> Option<Bf16> {
        (self.set >= NeonSet::Bf16).then_some(Bf16 { neon: self })
    }
}

/// Proof of the dot products of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dotprod {
    neon: Neon,
}

/// Proof of the matrix products of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct I8mm {
    neon: Neon,
}

/// Proof of the matrix products of bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16 {
    neon: Neon,
}

macro_rules! neon_of {
    ($($token:ident)+) => {
        $(impl $token {
            pub fn neon(self) -> Neon {
                self.neon
            }
        })+
    };
}
neon_of!(Dotprod I8mm Bf16);
