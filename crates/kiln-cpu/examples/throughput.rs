//! Measures the throughput of the expensive operations, and their share of the machine's peak.
//!
//! `cargo run --release -p kiln-cpu --example throughput [ISA] [THREADS] [NAME FILTER]`

use std::hint::black_box;
use std::time::{Duration, Instant};

use kiln_cpu::{CpuBackend, CpuOptions, CpuTensor, Isa};
use kiln_ops::{
    AttentionMask, AttentionSpec, Backend, ConvGeometry, Residency, Result, RopeLayout, RopeTable, RowGroups,
};
use kiln_tensor::{DType, HostLinear, HostTensor, Rotation};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let isa = arguments.next().map(|name| name.parse()).transpose()?;
    let threads = arguments.next().and_then(|n| n.parse().ok());
    let filter = arguments.next().unwrap_or_default();
    let b = CpuBackend::new(CpuOptions { isa, threads })?;
    println!("{}", b.name());
    let wanted = |name: &str| name.contains(&filter);
    let report = |name: &str, flops: f64, work: &dyn Fn() -> Result<()>| -> Result<()> {
        // AMX multiplies bf16 by bf16, or int8 at twice the rate; everything else runs in vectors.
        let int8 = name.contains(" i8·");
        let tiles = b.isa() == Isa::Amx && (int8 || name.ends_with("bf16·bf16"));
        let unit = if b.isa() == Isa::Amx && !tiles { Isa::Avx512 } else { b.isa() };
        // Vectors multiply four int8 values in place of one f32.
        let factor = if tiles { 2.0 } else { 4.0 };
        let (best, share) = measure(&b, unit, if int8 { flops / factor } else { flops }, work)?;
        let (ms, rate) = (best * 1e3, flops / best / 1e9);
        println!("{name:38} {ms:8.2} ms {rate:7.0} GFLOP/s, {:3.0} % of peak", 100.0 * share);
        Ok(())
    };

    for (rows, cols, out) in [
        (336, 3072, 1024),
        (512, 3072, 9216),
        (1536, 3072, 9216),
        (1536, 3072, 27648),
        (1536, 12288, 3072),
        (512, 2560, 9728),
        (1, 3072, 18432),
    ] {
        for (dtype, act) in [
            (DType::BF16, DType::F32),
            (DType::F32, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::I8, DType::BF16),
        ] {
            let name = format!("linear {rows}×{cols}→{out} {dtype}·{act}");
            if !wanted(&name) {
                continue;
            }
            let w = b.load_weight(weight([out, cols], dtype)?, Residency::Device)?;
            let x = tensor(&b, [rows, cols], act)?;
            report(&name, 2.0 * (rows * cols * out) as f64, &|| b.linear(&x, &w).map(drop))?;
        }
    }
    for (size, cin, cout) in [(512, 128, 128), (256, 256, 256), (64, 512, 512), (512, 128, 3)] {
        for dtype in [DType::F32, DType::BF16] {
            let name = format!("conv2d {size}×{size}×{cin}→{cout} 3×3 {dtype}·{dtype}");
            if !wanted(&name) {
                continue;
            }
            let conv = b.load_conv(&host([cout, cin, 3, 3]).to_dtype(dtype)?, None)?;
            let x = tensor(&b, [size, size, cin], dtype)?;
            let flops = 2.0 * (size * size * cin * cout * 9) as f64;
            report(&name, flops, &|| b.conv2d(&x, &conv, ConvGeometry::same(3), None).map(drop))?;
        }
    }
    for (tokens, heads, dim) in [(1536, 24, 128), (4608, 24, 128), (4096, 1, 512)] {
        for dtype in [DType::F32, DType::BF16] {
            let name = format!("attention {tokens} tokens, {heads}×{dim} {dtype}·{dtype}");
            if !wanted(&name) {
                continue;
            }
            let qkv = [0; 3].map(|_| tensor(&b, [tokens, heads * dim], dtype));
            let [q, k, v] = qkv;
            let (q, k, v) = (q?, k?, v?);
            let spec = AttentionSpec::new(heads, heads, AttentionMask::None);
            let flops = 4.0 * (tokens * tokens * heads * dim) as f64;
            report(&name, flops, &|| b.attention(&[&q], &[&k], &[&v], &spec).map(drop))?;
        }
    }
    for dtype in [DType::F32, DType::BF16] {
        memory_bound(&b, dtype, &wanted)?;
    }
    Ok(())
}

/// Measures operations that are limited by memory bandwidth.
fn memory_bound(b: &CpuBackend, dtype: DType, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
    let rate = |name: &str, elements: usize, work: &dyn Fn() -> Result<()>| -> Result<()> {
        let name = format!("{name} {dtype}");
        if !wanted(&name) {
            return Ok(());
        }
        let (best, _) = measure(b, Isa::Portable, 1.0, work)?;
        let bytes = (elements * dtype.size()) as f64;
        println!("{name:38} {:8.2} ms {:7.1} GB/s", best * 1e3, bytes / best / 1e9);
        Ok(())
    };
    let x = tensor(b, [1536, 18432], dtype)?;
    rate("swiglu 1536×18432", 1536 * 18432 * 3 / 2, &|| b.swiglu(&x).map(drop))?;
    let x = tensor(b, [512, 512, 128], dtype)?;
    let (w, z) = (tensor(b, [128], DType::F32)?, tensor(b, [128], DType::F32)?);
    rate("group_norm 512×512×128", 2 << 25, &|| {
        b.group_norm(&x, 32, &w, &z, 1e-6, Some(kiln_ops::Activation::Silu)).map(drop)
    })?;
    let x = tensor(b, [1536, 3072], dtype)?;
    let w = tensor(b, [3072], DType::F32)?;
    let elements = 2 * 1536 * 3072;
    rate("rms_norm 1536×3072", elements, &|| b.rms_norm(&x, &w, 1e-6).map(drop))?;
    let scale = tensor(b, [1, 3072], DType::F32)?;
    rate("ada_layer_norm 1536×3072", elements, &|| {
        b.ada_layer_norm(&x, &scale, &scale, &RowGroups::single(1536), 1e-6).map(drop)
    })?;
    let table = || tensor(b, [1536, 64], DType::F32);
    let rope = RopeTable { cos: table()?, sin: table()?, pairs: RopeLayout::Interleaved };
    let w = tensor(b, [128], DType::F32)?;
    rate("norm_rope 1536×24×128", elements, &|| b.norm_rope(&x, Some(&w), &rope, 1e-6).map(drop))
}

fn host<const N: usize>(shape: [usize; N]) -> HostTensor {
    let n = shape.iter().product();
    let values = (0..n).map(|i: usize| (i.wrapping_mul(2_654_435_761) % 2001) as f32 * 1e-3 - 1.0).collect();
    HostTensor::from_f32(shape, values).expect("the length fits")
}

fn weight([out, cols]: [usize; 2], dtype: DType) -> Result<HostLinear> {
    if dtype != DType::I8 {
        return Ok(HostLinear::dense(vec![host([out, cols]).to_dtype(dtype)?])?);
    }
    let bytes: Vec<u8> = (0..out * cols).map(|i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
    let integers = HostTensor::new(dtype, [out, cols], bytes.into())?;
    Ok(HostLinear::int8(vec![integers], vec![host([out])], Rotation::for_width(cols))?)
}

fn tensor<const N: usize>(b: &CpuBackend, shape: [usize; N], dtype: DType) -> Result<CpuTensor> {
    b.upload(&host(shape), dtype)
}

/// The time: with one thread its CPU time, if the system reports it, so that other programs disturb less; otherwise
/// wall time.
fn now(threads: usize) -> Duration {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    let thread_time = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    };
    (threads == 1).then(thread_time).flatten().unwrap_or_else(|| START.elapsed())
}

/// Seconds of the fastest of at least five runs, more if they are short; and the median share of the peak, which is measured
/// again before and after every run because the machine's clock and load change all the time.
fn measure(b: &CpuBackend, unit: Isa, flops: f64, work: &dyn Fn() -> Result<()>) -> Result<(f64, f64)> {
    let threads = b.threads();
    let mut best = f64::INFINITY;
    let mut shares = Vec::new();
    let begin = Instant::now();
    let mut before = peak(unit);
    while shares.len() < 5 || (begin.elapsed() < Duration::from_secs(2) && shares.len() < 1000) {
        let start = now(threads);
        work()?;
        let time = (now(threads) - start).as_secs_f64();
        let after = peak(unit);
        shares.push(flops / time / ((before + after) / 2.0 * threads as f64));
        best = best.min(time);
        before = after;
    }
    shares.sort_by(f64::total_cmp);
    Ok((best, shares[shares.len() / 2]))
}

/// The multiply-adds of one thread from registers alone, in flop/s.
fn peak(isa: Isa) -> f64 {
    const STEPS: u64 = 100_000;
    let (steps, flops) = match isa {
        // Twelve vectors, or four tiles of 16 × 16 sums over 32 values.
        Isa::Amx => (STEPS / 16, 4.0 * 16.0 * 16.0 * 32.0 * 2.0),
        Isa::Avx512 => (STEPS, 12.0 * 16.0 * 2.0),
        Isa::Avx2 => (STEPS, 12.0 * 8.0 * 2.0),
        // Plain Rust has no peak to compare with; that of NEON is not measured.
        _ => return f64::NAN,
    };
    let rate = || {
        let start = Instant::now();
        black_box(spin(isa, steps));
        steps as f64 * flops / start.elapsed().as_secs_f64()
    };
    // The median: the clock of a shared machine jumps, and the best of many would be a rate it holds only for a moment.
    let mut rates: Vec<f64> = (0..31).map(|_| rate()).collect();
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

#[cfg(target_arch = "x86_64")]
fn spin(isa: Isa, steps: u64) -> f32 {
    use std::arch::x86_64::*;
    macro_rules! fmas {
        ($splat:ident, $fma:ident, $lower:ident, $steps:expr) => {{
            let (a, b) = ($splat(black_box(0.999)), $splat(black_box(1e-3)));
            let mut sums = [$splat(0.5); 12];
            for _ in 0..$steps {
                for sum in &mut sums {
                    *sum = $fma(a, *sum, b);
                }
            }
            sums.into_iter().map(|v| $lower(v)).sum()
        }};
    }
    #[target_feature(enable = "avx512f")]
    fn avx512(steps: u64) -> f32 {
        fmas!(_mm512_set1_ps, _mm512_fmadd_ps, _mm512_cvtss_f32, steps)
    }
    #[target_feature(enable = "avx2,fma")]
    fn avx2(steps: u64) -> f32 {
        fmas!(_mm256_set1_ps, _mm256_fmadd_ps, _mm256_cvtss_f32, steps)
    }
    /// # Safety
    /// The machine has AMX and the process may use it.
    unsafe fn tiles(steps: u64) -> f32 {
        #[repr(align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            config.0[16 + 2 * tile] = 64;
            config.0[48 + tile] = 16;
        }
        // Zeros would be multiplied faster than real values.
        let values: [u16; 2048] = std::array::from_fn(|i| 0x3f00 | ((i * 40503) >> 4) as u16 & 0x80ff);
        // SAFETY: the configuration has eight full tiles; four are read.
        unsafe {
            std::arch::asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tileloadd tmm4, [{values} + {row}]",
                "tileloadd tmm5, [{values} + {row} + 1024]",
                "tileloadd tmm6, [{values} + {row} + 2048]",
                "tileloadd tmm7, [{values} + {row} + 3072]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {steps}",
                "jnz 2b",
                "tilerelease",
                config = in(reg) &config,
                values = in(reg) values.as_ptr(),
                row = in(reg) 64usize,
                steps = inout(reg) steps => _,
                options(nostack)
            );
        }
        0.0
    }
    match isa {
        // SAFETY: the backend runs on this instruction set, so the machine has it.
        Isa::Avx512 => unsafe { avx512(steps) },
        // SAFETY: as above.
        Isa::Avx2 => unsafe { avx2(steps) },
        // SAFETY: as above; the backend has requested permission for AMX.
        Isa::Amx => unsafe { tiles(steps) },
        _ => 0.0,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn spin(_: Isa, _: u64) -> f32 {
    0.0
}
