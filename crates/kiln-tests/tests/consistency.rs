//! Properties that hold to the last bit, at sizes that are split into many tasks.

use kiln_cpu::{CpuBackend, CpuOptions, CpuTensor, Isa};
use kiln_ops::{
    Activation, AttentionMask, AttentionSpec, Backend, ConvGeometry, Residency, RopeLayout, RopeTable,
    RowGroups, Tensor,
};
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Rotation};
use sha2::{Digest, Sha256};

fn backends(threads: usize) -> Vec<CpuBackend> {
    let backend = |isa| CpuBackend::new(CpuOptions { isa: Some(isa), threads: Some(threads) }).unwrap();
    Isa::available().into_iter().map(backend).collect()
}

/// Pseudorandom values between -1 and 1.
fn host<const N: usize>(seed: u32, shape: [usize; N]) -> HostTensor {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    HostTensor::from_f32(shape, (0..shape.iter().product()).map(|_| next()).collect()).unwrap()
}

fn tensor<const N: usize>(b: &CpuBackend, seed: u32, shape: [usize; N], dtype: DType) -> CpuTensor {
    b.upload(&host(seed, shape), dtype).unwrap()
}

fn bytes(b: &CpuBackend, x: &CpuTensor) -> Vec<u8> {
    b.download(x).unwrap().bytes().to_vec()
}

fn lora_layer(out: usize, cols: usize) -> HostLinear {
    let half = out / 2;
    let matrices = vec![host(1, [half, cols]), host(2, [out - half, cols])];
    let matrices = matrices.into_iter().map(|s| s.to_dtype(DType::BF16).unwrap()).collect();
    let delta = LoraDelta { row: 7, down: host(3, [9, cols]), up: host(4, [out - 20, 9]), scale: 0.5 };
    let linear = HostLinear::dense(matrices).unwrap().with_bias(host(5, [out])).unwrap();
    linear.with_deltas(vec![delta]).unwrap()
}

#[test]
fn a_row_of_a_product_does_not_depend_on_the_other_rows() {
    // More rows and columns than one block, a depth of several blocks.
    let (rows, cols, out) = (1501, 900, 300);
    for b in backends(3) {
        let w = b.load_weight(lora_layer(out, cols), Residency::Device).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let x = tensor(&b, 6, [rows, cols], dtype);
            let all = b.linear(&x, &w).unwrap();
            for range in [0..6, 100..133, 1340..1360, 1490..1501] {
                let some = b.linear(&b.slice_rows(&x, range.clone()).unwrap(), &w).unwrap();
                let same = bytes(&b, &b.slice_rows(&all, range.clone()).unwrap()) == bytes(&b, &some);
                assert!(same, "{} {dtype}: rows {range:?}", b.name());
            }
        }
    }
}

/// An int8 layer without bias and updates.
fn int8_layer(out: usize, cols: usize) -> HostLinear {
    let bytes: Vec<u8> = (0..out * cols).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    let weight = HostTensor::new(DType::I8, [out, cols], bytes.into()).unwrap();
    HostLinear::int8(vec![weight], vec![host(9, [out])], Rotation::for_width(cols)).unwrap()
}

#[test]
fn an_int8_product_is_the_same_on_every_instruction_set() {
    // More rows and columns than one block, a depth of several blocks, tails everywhere.
    let (rows, cols, out) = (1400, 1100, 140);
    for dtype in [DType::F32, DType::BF16] {
        let results: Vec<_> = backends(3)
            .iter()
            .map(|b| {
                let (w, x) = (
                    b.load_weight(int8_layer(out, cols), Residency::Device).unwrap(),
                    tensor(b, 6, [rows, cols], dtype),
                );
                let few = b.linear(&b.slice_rows(&x, 700..703).unwrap(), &w).unwrap();
                let all = b.linear(&x, &w).unwrap();
                assert!(bytes(b, &b.slice_rows(&all, 700..703).unwrap()) == bytes(b, &few), "{}", b.name());
                (b.name(), bytes(b, &all))
            })
            .collect();
        for (name, found) in &results {
            assert!(*found == results[0].1, "{name} {dtype}");
        }
    }
}

#[test]
fn a_large_int8_product_is_that_of_its_rows() {
    // Large enough for non-temporal stores; some quads of tiles belong to two row groups; the last block has a tail.
    let (rows, cols, out) = (1260, 1100, 4128);
    let b = CpuBackend::new(CpuOptions { isa: None, threads: Some(3) }).unwrap();
    let w = b.load_weight(int8_layer(out, cols), Residency::Device).unwrap();
    let x = tensor(&b, 6, [rows, cols], DType::BF16);
    let residual = tensor(&b, 7, [rows, out], DType::BF16);
    let gate = tensor(&b, 8, [2, out], DType::F32);
    let groups = RowGroups::from_lengths(&[500, rows - 500]);
    let plain = b.linear(&x, &w).unwrap();
    let [first, second] = b.linear_split(&x, &w, [96, out - 96]).unwrap();
    let added = b.linear_gated_add(&[&x], &w, Some((&gate, &groups)), &residual).unwrap();
    for range in [0..70, 490..510, 800..830, 1250..1260] {
        let part = |t| b.slice_rows(t, range.clone()).unwrap();
        let x = part(&x);
        assert!(bytes(&b, &part(&plain)) == bytes(&b, &b.linear(&x, &w).unwrap()), "{range:?}");
        let some = b.linear_split(&x, &w, [96, out - 96]).unwrap();
        let same = [&first, &second].into_iter().zip(&some).all(|(a, s)| bytes(&b, &part(a)) == bytes(&b, s));
        assert!(same, "{range:?}, split");
        let first = range.clone().filter(|&row| row < 500).count();
        let groups = RowGroups::from_lengths(&[first, range.len() - first]);
        let some = b.linear_gated_add(&[&x], &w, Some((&gate, &groups)), &part(&residual)).unwrap();
        assert!(bytes(&b, &part(&added)) == bytes(&b, &some), "{range:?}, gated");
    }
}

#[test]
fn nan_and_infinity_stay_in_their_row() {
    for b in backends(2) {
        let w = b.load_weight(int8_layer(40, 50), Residency::Device).unwrap();
        let mut x = host(3, [7, 50]).to_f32().unwrap().into_owned();
        x[2 * 50 + 49] = f32::NAN;
        x[5 * 50] = f32::INFINITY;
        let x = HostTensor::from_f32([7, 50], x).unwrap();
        let y = b.download(&b.linear(&b.upload(&x, DType::F32).unwrap(), &w).unwrap()).unwrap();
        for (i, row) in y.to_f32().unwrap().chunks(40).enumerate() {
            let nans = row.iter().filter(|v| v.is_nan()).count();
            assert_eq!(nans, if i == 2 || i == 5 { 40 } else { 0 }, "{} row {i}", b.name());
        }
    }
}

#[test]
fn a_query_does_not_depend_on_the_other_queries() {
    let (queries, keys, heads, dim) = (300, 800, 2, 40);
    for b in backends(3) {
        let q = tensor(&b, 1, [queries, heads * dim], DType::F32);
        let [k, v] = [2, 3].map(|seed| tensor(&b, seed, [keys, heads * dim], DType::F32));
        let spec = AttentionSpec::new(heads, heads, AttentionMask::None);
        let all = b.attention(&[&q], &[&k], &[&v], &spec).unwrap();
        for range in [0..1, 120..150, 299..300] {
            let some = b.slice_rows(&q, range.clone()).unwrap();
            let some = b.attention(&[&some], &[&k], &[&v], &spec).unwrap();
            let same = bytes(&b, &b.slice_rows(&all, range.clone()).unwrap()) == bytes(&b, &some);
            assert!(same, "{}: queries {range:?}", b.name());
        }
    }
}

/// The results in f32 of all operations that add up, in many tasks and with tails on every vector length.
fn f32_results(b: &CpuBackend) -> Vec<(&'static str, Vec<u8>)> {
    let x = tensor(b, 1, [1500, 400], DType::F32);
    let w = b.load_weight(lora_layer(400, 400), Residency::Device).unwrap();
    let y = b.linear(&x, &w).unwrap();
    let gate = tensor(b, 2, [2, 400], DType::F32);
    let groups = RowGroups::from_lengths(&[700, 800]);
    let added = b.linear_gated_add(&[&x], &w, Some((&gate, &groups)), &y).unwrap();
    let row = b.linear(&b.slice_rows(&x, 3..5).unwrap(), &w).unwrap();
    let deltas = lora_layer(400, 400).deltas().to_vec();
    let int8 = b.load_weight(int8_layer(400, 400).with_deltas(deltas).unwrap(), Residency::Device).unwrap();
    let int8 = b.linear(&x, &int8).unwrap();
    let spec = AttentionSpec::new(5, 5, AttentionMask::Causal { valid: 1111 });
    let attended = b.attention(&[&x], &[&y], &[&added], &spec).unwrap();
    let image = b.reshape(&x, [100, 125, 48].into()).unwrap();
    let [wide, narrow] =
        [40, 3].map(|out| b.load_conv(&host(3, [out, 48, 3, 3]), Some(&host(4, [out]))).unwrap());
    let [wide, narrow] = [wide, narrow].map(|c| b.conv2d(&image, &c, ConvGeometry::same(3), None).unwrap());
    let [one, zero] = [5, 6].map(|seed| tensor(b, seed, [48], DType::F32));
    let normed = b.group_norm(&image, 16, &one, &zero, 1e-6, None).unwrap();
    let [odd, other] = [7, 8].map(|seed| tensor(b, seed, [60, 210], DType::F32));
    let (weight, modulation) = (tensor(b, 9, [210], DType::F32), tensor(b, 10, [1, 210], DType::F32));
    let rms = b.rms_norm(&odd, &weight, 1e-6).unwrap();
    let layer = b.ada_layer_norm(&odd, &modulation, &modulation, &RowGroups::single(60), 1e-6).unwrap();
    let [cos, sin] = [11, 12].map(|seed| tensor(b, seed, [60, 35], DType::F32));
    let rope = RopeTable { cos, sin, pairs: RopeLayout::Interleaved };
    let rotated = b.norm_rope(&odd, Some(&tensor(b, 13, [70], DType::F32)), &rope, 1e-6).unwrap();
    let odd_layer = b.load_weight(lora_layer(61, 210), Residency::Device).unwrap();
    let few = b.linear(&b.slice_rows(&odd, 3..8).unwrap(), &odd_layer).unwrap();
    let gated = b.swiglu(&odd).unwrap();
    let [activated, clamped] =
        [Activation::Silu, Activation::SoftClamp].map(|f| b.activation(&odd, f).unwrap());
    let distance = b.relative_l1(&odd, &other).unwrap();
    let named = [
        ("linear", y),
        ("linear_gated_add", added),
        ("linear of two rows", row),
        ("linear of five rows", few),
        ("int8", int8),
        ("attention", attended),
        ("conv2d", wide),
        ("conv2d to three channels", narrow),
        ("group_norm", normed),
        ("rms_norm", rms),
        ("ada_layer_norm", layer),
        ("norm_rope", rotated),
        ("swiglu", gated),
        ("silu", activated),
        ("soft_clamp", clamped),
        ("relative_l1", distance),
    ];
    named.into_iter().map(|(name, t)| (name, bytes(b, &t))).collect()
}

/// The results of operations whose tasks depend on the number of threads.
fn results(b: &CpuBackend) -> Vec<(&'static str, Vec<u8>)> {
    let x = tensor(b, 1, [1500, 400], DType::BF16);
    let w = b.load_weight(lora_layer(400, 400), Residency::Device).unwrap();
    let bf16 = b.linear(&x, &w).unwrap();
    let mut all = f32_results(b);
    all.push(("bf16", bytes(b, &bf16)));
    all
}

/// A sum of products is rounded once or twice a step, so that only sets with fused multiply-adds agree.
#[test]
fn f32_is_the_same_on_every_instruction_set_and_machine() {
    /// The SHA-256 of all results. A kernel that adds up in another order changes it.
    const EXPECTED: &str = "157974dd980cefb7fb6090d0a7dec66da81aa25ad83a87a81848e90f5295b30c";
    let backends: Vec<_> = backends(3).into_iter().filter(|b| b.isa().fuses_multiply_add()).collect();
    let mut first: Option<Vec<_>> = None;
    for b in &backends {
        let found = f32_results(b);
        for ((name, expected), (_, found)) in first.iter().flatten().zip(&found) {
            assert!(expected == found, "{}: {name}", b.name());
        }
        first.get_or_insert(found);
    }
    // None without FMA, as on x86-64 before 2013.
    let Some(results) = first else { return };
    let mut hash = Sha256::new();
    results.iter().for_each(|(_, bytes)| hash.update(bytes));
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(found, EXPECTED);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let one: Vec<_> = backends(1).iter().map(results).collect();
    for threads in [2, 5] {
        for (b, expected) in backends(threads).iter().zip(&one) {
            assert!(results(b) == *expected, "{}", b.name());
        }
    }
}

#[test]
fn views_share_memory_and_the_name_says_what_runs() {
    let b = CpuBackend::new(CpuOptions { isa: Some(Isa::Portable), threads: Some(2) }).unwrap();
    assert_eq!(b.name(), "cpu (portable, 2 threads)");
    let x = tensor(&b, 1, [4, 6], DType::BF16);
    let y = b.slice_rows(&b.reshape(&x, [2, 12].into()).unwrap(), 1..2).unwrap();
    assert_eq!((y.shape().dims(), y.dtype()), (&[1, 12][..], DType::BF16));
    assert_eq!(bytes(&b, &y), bytes(&b, &x)[24..]);
}
