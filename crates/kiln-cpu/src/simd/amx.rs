//! AMX: eight tile registers of 16 rows × 64 bytes, and an instruction that multiplies two of them.
//!
//! The instructions are written as assembly because the compiler's own names for them are not stable. The compiler
//! never uses tile registers itself; a [`Tiles`] holds the thread's configuration while it lives.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::LazyLock;

use super::Avx512;

/// Bytes of a tile: 16 rows of 64.
pub(crate) const TILE_BYTES: usize = 1024;
/// Elements of a bf16 tile: 16 rows of 32.
pub(crate) const TILE: usize = TILE_BYTES / 2;

/// Proof of AVX-512 with bf16 and of AMX with bf16, which the system lets this process use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx {
    vectors: Avx512,
}

impl Amx {
    pub fn detect() -> Option<Amx> {
        static ALLOWED: LazyLock<bool> = LazyLock::new(|| on_chip() && ask());
        let vectors = Avx512::detect()?;
        ALLOWED.then_some(Amx { vectors })
    }

    pub fn vectors(self) -> Avx512 {
        self.vectors
    }

    /// Whether the tiles multiply bytes, too.
    pub fn has_int8(self) -> bool {
        const INT8: u32 = 1 << 25;
        static FOUND: LazyLock<bool> = LazyLock::new(|| features() & INT8 != 0);
        *FOUND
    }

    /// Prepares this thread's tile registers.
    pub fn tiles(self) -> Tiles {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut config =
            Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: the token proves the instructions; the 64 bytes describe eight full tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
        Tiles(PhantomData)
    }
}

/// Whether the processor has tiles and multiplies bf16 in them.
fn on_chip() -> bool {
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    // Every chip with tiles has these vectors.
    if Avx512::detect().is_none() || !is_x86_feature_detected!("avx512bf16") {
        return false;
    }
    features() & (BF16 | TILES) == BF16 | TILES
}

/// What the processor says of its tiles, where it has AVX-512.
fn features() -> u32 {
    // SAFETY: there is a leaf 7, where AVX-512 was found. Newer compilers know that the instruction is always safe.
    #[allow(unused_unsafe)]
    let leaf = unsafe { __cpuid_count(7, 0) };
    leaf.edx
}

/// Asks the kernel for the tile registers: 8 KiB of state that a process has only on request.
#[cfg(target_os = "linux")]
fn ask() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the call takes two numbers and touches no memory of ours; `syscall` changes rcx and r11.
    unsafe {
        asm!(
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
fn ask() -> bool {
    false
}

/// This thread's tile registers, all 16 rows of 64 bytes.
pub(crate) struct Tiles(PhantomData<*mut ()>);

/// The operands of a product of tiles.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    /// For every step two tiles, one below the other: rows of 64 bytes of the sum.
    pub a: *const u8,
    /// For every step two tiles, side by side: 16 rows, each of 4 bytes of the sum for 16 columns.
    pub b: *const u8,
    /// Four tiles of sums: top left, top right, bottom left, bottom right.
    pub c: *mut u8,
    /// At least 1.
    pub steps: usize,
    pub add: bool,
}

/// Bytes of [`Fetch::ahead`] that are fetched in a step.
pub(crate) const AHEAD: usize = 256;

/// What is fetched into the second-level cache during a product; it may lie anywhere.
#[derive(Clone, Copy)]
pub(crate) struct Fetch {
    /// Two rows that are soon to be read, a cache line a step.
    pub next: [*const u8; 2],
    /// Tiles that are to be read later, [`AHEAD`] bytes a step.
    pub ahead: *const u8,
}

/// One product of tiles; `fetch` are instructions of a step, and what they use.
macro_rules! multiply {
    ($(#[$doc:meta])* $name:ident($p:ident $(, $arg:ident: $ty:ty)?), $dot:literal,
        [$($fetch:literal),*], {$($operand:tt)*}) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The machine has the instruction; `a` and `b` hold `2 · steps` tiles of [`TILE_BYTES`], `c` four.
        #[inline(always)]
        pub unsafe fn $name(&mut self, $p: Pair $(, $arg: $ty)?) {
            // SAFETY: the configuration is in place as long as `self` lives; the memory is as the caller promises.
            // Fetching ahead never faults.
            unsafe {
                asm!(
                    "test {add}, {add}",
                    "jnz 2f",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "jmp 3f",
                    "2:",
                    // Sums and right tiles are read once a pass: the hint keeps them from driving the left tiles out
                    // of the first-level cache.
                    "tileloaddt1 tmm0, [{c} + {row}]",
                    "tileloaddt1 tmm1, [{c} + {row} + 1024]",
                    "tileloaddt1 tmm2, [{c} + {row} + 2048]",
                    "tileloaddt1 tmm3, [{c} + {row} + 3072]",
                    "3:",
                    "tileloaddt1 tmm6, [{b} + {row}]",
                    "tileloadd tmm4, [{a} + {row}]",
                    concat!($dot, " tmm0, tmm4, tmm6"),
                    "tileloaddt1 tmm7, [{b} + {row} + 1024]",
                    concat!($dot, " tmm1, tmm4, tmm7"),
                    "tileloadd tmm5, [{a} + {row} + 1024]",
                    concat!($dot, " tmm2, tmm5, tmm6"),
                    concat!($dot, " tmm3, tmm5, tmm7"),
                    $($fetch,)*
                    "add {a}, 2048",
                    "add {b}, 2048",
                    "dec {steps}",
                    "jnz 3b",
                    "tilestored [{c} + {row}], tmm0",
                    "tilestored [{c} + {row} + 1024], tmm1",
                    "tilestored [{c} + {row} + 2048], tmm2",
                    "tilestored [{c} + {row} + 3072], tmm3",
                    a = inout(reg) $p.a => _,
                    b = inout(reg) $p.b => _,
                    c = in(reg) $p.c,
                    steps = inout(reg) $p.steps => _,
                    add = in(reg) usize::from($p.add),
                    row = in(reg) 64usize,
                    $($operand)*
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
    ($(#[$doc:meta])* $name:ident fetching, $dot:literal) => {
        multiply!(
            $(#[$doc])*
            $name(p, f: Fetch),
            $dot,
            [
                "prefetcht1 [{next0}]",
                "prefetcht1 [{next1}]",
                "prefetcht1 [{ahead}]",
                "prefetcht1 [{ahead} + 64]",
                "prefetcht1 [{ahead} + 128]",
                "prefetcht1 [{ahead} + 192]",
                "add {ahead}, 256",
                "add {next0}, 64",
                "add {next1}, 64"
            ],
            {
                next0 = inout(reg) f.next[0] => _,
                next1 = inout(reg) f.next[1] => _,
                ahead = inout(reg) f.ahead => _,
            }
        );
    };
}

impl Tiles {
    multiply!(
        /// Writes the 32 × 32 sums of `a · b`, bf16, added to what is there when `add`.
        multiply(p),
        "tdpbf16ps",
        [],
        {}
    );
    multiply!(
        /// [`Tiles::multiply`], fetching meanwhile.
        multiply_halves fetching,
        "tdpbf16ps"
    );
    multiply!(
        /// [`Tiles::multiply_halves`] for bytes, whose sums are of 32 bits.
        multiply_bytes fetching,
        "tdpbssd"
    );
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: leaves the registers as a thread has them that never used them, so that switching threads is cheap.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
