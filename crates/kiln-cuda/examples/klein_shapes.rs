//! Times the operations of klein 4B at 1024×1024 on the GPU and prints their throughput.
//!
//! ```sh
//! cargo run --release -p kiln-cuda --example klein_shapes
//! ```
//!
//! An argument selects the operations whose name contains it.

use kiln_cuda::{CudaBackend, CudaTensor, Options};
use kiln_ops::{
    Activation, AttentionMask, AttentionSpec, Backend, ConvGeometry, Residency, Result, RopeLayout,
    RopeTable, RowGroups,
};
use kiln_tensor::{DType, HostLinear, HostTensor, Shape, bf16};

const TEXT: usize = 512;
const IMAGE: usize = 4096;
const TOKENS: usize = TEXT + IMAGE;
const DIM: usize = 3072;
const HEADS: usize = 24;
const MLP: usize = 9216;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let b = CudaBackend::new(&Options::default())?;
    println!("{}", b.name());
    if let Some(e) = b.cublaslt_error() {
        println!("without cuBLASLt: {e}");
    }
    let bench = Bench { b, filter: std::env::args().nth(1).unwrap_or_default() };
    bench.linears()?;
    bench.attentions()?;
    bench.small()?;
    bench.images()?;
    println!("{:.1} GiB of GPU memory held", bench.b.memory_held() as f64 / (1u64 << 30) as f64);
    Ok(())
}

struct Bench {
    b: CudaBackend,
    filter: String,
}

/// The work that throughput is computed from.
enum Work {
    /// Floating-point operations.
    Flops(f64),
    /// Bytes read and written.
    Bytes(f64),
}

impl Bench {
    fn line(&self, name: &str, work: Work, run: impl Fn() -> Result<()>) -> Result<()> {
        if !name.contains(&self.filter) {
            return Ok(());
        }
        // Compile kernels, create plans and fill the memory cache.
        run()?;
        run()?;
        self.b.wait()?;
        const REPEATS: usize = 5;
        let mut times = Vec::new();
        for _ in 0..5 {
            times.push(self.b.time(|| (0..REPEATS).try_for_each(|_| run()))? / REPEATS as f32);
        }
        times.sort_by(f32::total_cmp);
        let best = times[0];
        let (ms, spread) = (f64::from(times[2]), times[4] - times[0]);
        let rate = match work {
            Work::Flops(n) => format!("{:8.1} TFLOP/s", n / ms / 1e9),
            Work::Bytes(n) => format!("{:8.2} TB/s", n / ms / 1e9),
        };
        println!("{name:44} {ms:9.3} ms ±{spread:.3} (best {best:.3})  {rate}");
        Ok(())
    }

    /// Pseudo-random values, a few thousand repeated.
    fn values(count: usize) -> Vec<bf16> {
        let mut state = 12345u32;
        let few: Vec<bf16> = (0..8191)
            .map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
            })
            .collect();
        few.iter().copied().cycle().take(count).collect()
    }

    fn host(shape: impl Into<Shape>) -> Result<HostTensor> {
        let shape = shape.into();
        let count = shape.numel();
        Ok(HostTensor::from_bf16(shape, Self::values(count))?)
    }

    fn activation(&self, shape: impl Into<Shape>) -> Result<CudaTensor> {
        self.b.upload(&Self::host(shape)?, DType::BF16)
    }

    fn parameter(&self, shape: impl Into<Shape>) -> Result<CudaTensor> {
        self.b.upload(&Self::host(shape)?, DType::F32)
    }

    fn linears(&self) -> Result<()> {
        let b = &self.b;
        let weight = |out: usize, input: usize| {
            b.load_weight(HostLinear::dense(vec![Self::host([out, input])?])?, Residency::Device)
        };
        let flops = |rows: usize, out: usize, input: usize| Work::Flops(2.0 * (rows * out * input) as f64);
        for rows in [TEXT, IMAGE] {
            let x = self.activation([rows, DIM])?;
            let qkv = weight(3 * DIM, DIM)?;
            self.line(&format!("linear_split {rows}x{DIM} to 3x{DIM}"), flops(rows, 3 * DIM, DIM), || {
                b.linear_split(&x, &qkv, [DIM; 3]).map(|_| ())
            })?;
            let up = weight(2 * MLP, DIM)?;
            self.line(&format!("linear {rows}x{DIM} to {}", 2 * MLP), flops(rows, 2 * MLP, DIM), || {
                b.linear(&x, &up).map(|_| ())
            })?;
        }
        let x = self.activation([TOKENS, DIM])?;
        let one = weight(3 * DIM + 2 * MLP, DIM)?;
        let widths = [DIM, DIM, DIM, 2 * MLP];
        self.line(
            &format!("linear_split {TOKENS}x{DIM} to 3x{DIM}, {}", 2 * MLP),
            flops(TOKENS, 3 * DIM + 2 * MLP, DIM),
            || b.linear_split(&x, &one, widths).map(|_| ()),
        )?;
        let (left, right) = (self.activation([TOKENS, DIM])?, self.activation([TOKENS, MLP])?);
        let out = weight(DIM, DIM + MLP)?;
        let (gate, groups) = (self.parameter([1, DIM])?, RowGroups::single(TOKENS));
        self.line(
            &format!("linear_gated_add {TOKENS}x({DIM}+{MLP}) to {DIM}"),
            flops(TOKENS, DIM, DIM + MLP),
            || b.linear_gated_add(&[&left, &right], &out, Some((&gate, &groups)), &x).map(|_| ()),
        )?;
        let square = weight(DIM, DIM)?;
        self.line(&format!("linear_gated_add {TOKENS}x{DIM} to {DIM}"), flops(TOKENS, DIM, DIM), || {
            b.linear_gated_add(&[&left], &square, Some((&gate, &groups)), &x).map(|_| ())
        })?;
        let time = self.parameter([1, DIM])?;
        let modulation = weight(6 * DIM, DIM)?;
        self.line(
            &format!("linear_split 1x{DIM} (f32) to 6x{DIM}"),
            Work::Bytes((6 * DIM * DIM * 2) as f64),
            || b.linear_split(&time, &modulation, [DIM; 6]).map(|_| ()),
        )?;
        // One token of dev's language model.
        for (input, out) in [(5120, 6144), (4096, 5120), (5120, 65536), (32768, 5120)] {
            let (x, w) = (self.activation([1, input])?, weight(out, input)?);
            self.line(&format!("linear 1x{input} to {out}"), Work::Bytes((2 * input * out) as f64), || {
                b.linear(&x, &w).map(|_| ())
            })?;
        }
        Ok(())
    }

    fn attentions(&self) -> Result<()> {
        let b = &self.b;
        let cases = [
            (TOKENS, HEADS, HEADS, 128, AttentionMask::None),
            (TEXT, 32, 8, 128, AttentionMask::Causal { valid: 100 }),
            (128 * 128, 1, 1, 512, AttentionMask::None),
        ];
        for (rows, heads, kv_heads, dim, mask) in cases {
            let q = self.activation([rows, heads * dim])?;
            let (k, v) = (self.activation([rows, kv_heads * dim])?, self.activation([rows, kv_heads * dim])?);
            let flops = Work::Flops(4.0 * (rows * rows * heads * dim) as f64);
            let spec = AttentionSpec::new(heads, kv_heads, mask);
            self.line(&format!("attention {rows}, {heads} heads of {dim}"), flops, || {
                b.attention(&[&q], &[&k], &[&v], &spec).map(|_| ())
            })?;
        }
        // One token of dev's language model.
        let (q, kv) = (self.activation([1, 32 * 128])?, self.activation([700, 8 * 128])?);
        let spec = AttentionSpec::new(32, 8, AttentionMask::None);
        self.line("attention 1 to 700, 32 heads of 128", Work::Bytes((2 * 2 * 700 * 8 * 128) as f64), || {
            b.attention(&[&q], &[&kv], &[&kv], &spec).map(|_| ())
        })
    }

    fn small(&self) -> Result<()> {
        let b = &self.b;
        let bytes = |reads: usize, writes: usize| Work::Bytes(2.0 * (reads + writes) as f64);
        let x = self.activation([TOKENS, DIM])?;
        let (scale, shift) = (self.parameter([1, DIM])?, self.parameter([1, DIM])?);
        let groups = RowGroups::single(TOKENS);
        let size = TOKENS * DIM;
        self.line("ada_layer_norm", bytes(size, size), || {
            b.ada_layer_norm(&x, &scale, &shift, &groups, 1e-6).map(|_| ())
        })?;
        let weight = self.parameter([128])?;
        let rope = RopeTable {
            cos: self.parameter([TOKENS, 64])?,
            sin: self.parameter([TOKENS, 64])?,
            pairs: RopeLayout::Interleaved,
        };
        self.line("norm_rope", bytes(size, size), || {
            b.norm_rope(&x, Some(&weight), &rope, 1e-6).map(|_| ())
        })?;
        let other = self.activation([TOKENS, DIM])?;
        self.line("qk_norm_rope", bytes(2 * size, 2 * size), || {
            b.qk_norm_rope([&x, &other], Some([&weight, &weight]), &rope, 1e-6).map(|_| ())
        })?;
        let wide = self.activation([TOKENS, 2 * MLP])?;
        self.line("swiglu", bytes(2 * TOKENS * MLP, TOKENS * MLP), || b.swiglu(&wide).map(|_| ()))?;
        self.line("add", bytes(2 * size, size), || b.add(&x, &x).map(|_| ()))?;
        let cache = std::cell::RefCell::new(self.activation([1024, 1024])?);
        let row = self.activation([1, 1024])?;
        self.line("write_rows 1x1024", bytes(1024, 1024), || b.write_rows(&mut cache.borrow_mut(), 700, &row))
    }

    fn images(&self) -> Result<()> {
        let b = &self.b;
        let cases = [(128, 512, 512), (256, 512, 512), (512, 256, 256), (1024, 128, 128), (1024, 128, 3)];
        for (size, input, out) in cases {
            let x = self.activation([size, size, input])?;
            let conv = b.load_conv(&Self::host([out, input, 3, 3])?, Some(&HostTensor::zeros([out])))?;
            let flops = Work::Flops(2.0 * (size * size * out * input * 9) as f64);
            self.line(&format!("conv2d {size}x{size}x{input} to {out}"), flops, || {
                b.conv2d(&x, &conv, ConvGeometry::same(3), None).map(|_| ())
            })?;
        }
        for (size, channels) in [(1024, 128), (512, 256), (256, 512), (128, 512)] {
            let x = self.activation([size, size, channels])?;
            let (weight, bias) = (self.parameter([channels])?, self.parameter([channels])?);
            let bytes = Work::Bytes(2.0 * 3.0 * (size * size * channels) as f64);
            self.line(&format!("group_norm {size}x{size}x{channels}, silu"), bytes, || {
                b.group_norm(&x, 32, &weight, &bias, 1e-6, Some(Activation::Silu)).map(|_| ())
            })?;
        }
        Ok(())
    }
}
