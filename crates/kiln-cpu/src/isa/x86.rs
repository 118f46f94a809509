//! Proofs of the instruction sets of x86-64: whoever holds one may use the instructions.

use std::arch::x86_64::__cpuid_count;
use std::sync::LazyLock;

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub fn detect() -> Option<Avx2> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Avx2(()))
    }
}

/// Proof of AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub fn detect() -> Option<Avx512> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Avx512(()))
    }
}

/// Proof of AVX-512 with bf16 and of AMX with bf16, and that the system lets this process use them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx {
    avx512: Avx512,
}

impl Amx {
    pub fn detect() -> Option<Amx> {
        static ALLOWED: LazyLock<bool> = LazyLock::new(|| cpu_has_amx() && request_permission());
        let avx512 = Avx512::detect()?;
        ALLOWED.then_some(Amx { avx512 })
    }

    pub fn avx512(self) -> Avx512 {
        self.avx512
    }

    /// Whether the tiles multiply int8, too.
    pub fn has_int8(self) -> bool {
        const INT8: u32 = 1 << 25;
        static FOUND: LazyLock<bool> = LazyLock::new(|| features() & INT8 != 0);
        *FOUND
    }
}

/// Whether the processor has tiles and multiplies bf16 in them.
fn cpu_has_amx() -> bool {
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    // Every processor with AMX has these.
    if Avx512::detect().is_none() || !is_x86_feature_detected!("avx512bf16") {
        return false;
    }
    features() & (BF16 | TILES) == BF16 | TILES
}

/// The cpuid word that describes AMX; only where AVX-512 was found.
fn features() -> u32 {
    // SAFETY: a processor with AVX-512 has leaf 7. Newer compilers consider the instruction safe.
    #[allow(unused_unsafe)]
    let leaf = unsafe { __cpuid_count(7, 0) };
    leaf.edx
}

/// Asks the kernel for permission to use the tile registers, whose 8 KiB of state a process gets only on request.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the call takes two integers and touches none of our memory; `syscall` clobbers rcx and r11.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}
