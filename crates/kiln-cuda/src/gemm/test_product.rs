//! A small product that every tiling of a kernel has to compute.

use std::fmt::Debug;
use std::sync::Arc;

use kiln_tensor::{DType, bf16};

use super::shape::{GemmShape, Operands};
use crate::device::Device;
use crate::error::Result;
use crate::options::Options;
use crate::queue::{DeviceBuffer, Queue};

/// The first GPU, or a line that says why there is none.
pub(super) fn open_gpu() -> Option<Queue> {
    let device = Device::new(&Options::default());
    device
        .inspect_err(|e| println!("skipped: no GPU to test on: {e}"))
        .ok()
        .map(|d| Queue::immediate(Arc::new(d)))
}

/// Small numbers, exact in every dtype, and their sums in f32.
fn value(i: usize) -> f32 {
    (i * 7919 % 31) as f32 / 4.0 - 3.75
}

pub(super) fn upload(queue: &Queue, bytes: &[u8]) -> DeviceBuffer {
    let buffer = queue.allocate(bytes.len()).unwrap().unwrap();
    queue.upload(bytes, buffer.ptr(queue)).unwrap();
    buffer
}

/// What becomes of a product's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Stored in bf16.
    Plain,
    /// With a bias and a summand, in f32.
    Added,
    /// With a bias, a gate and a summand, in bf16, of an x of two parts.
    Gated,
    /// In bf16.
    Swiglu,
}

/// All tilings of one product.
pub(super) fn check_tilings<T: Copy + Debug>(
    queue: &Queue,
    dtype: DType,
    [x_columns, w_columns]: [bool; 2],
    end: End,
    tilings: &[T],
    supports: fn(&Queue, &GemmShape, &Operands) -> bool,
    launch: impl Fn(&GemmShape, &Operands, T) -> Result<()>,
) {
    let (added, swiglu) = (matches!(end, End::Added | End::Gated), end == End::Swiglu);
    let single = dtype != DType::BF16 || w_columns || swiglu;
    let (rows, n, k, batch) = (328, 264, 160, if single { 1 } else { 2 });
    // Columns of x on the left, and rows of w.
    let (left, w_rows) = (if end == End::Gated { 64 } else { k }, if swiglu { 2 * n } else { n });
    let out_dtype = if end == End::Added { DType::F32 } else { DType::BF16 };
    let encode = |i: usize| match dtype {
        DType::BF16 => bf16::from_f32(value(i)).to_le_bytes().to_vec(),
        DType::I8 => vec![(4.0 * value(i)) as i8 as u8],
        // Powers of two from 2^-6 on, and their negatives.
        _ => vec![((1 + i * 7919 % 15) << 3 | (i % 3 % 2) << 7) as u8],
    };
    let decode = |i: usize| match dtype {
        DType::BF16 => value(i),
        DType::I8 => (4.0 * value(i)).trunc(),
        _ => (2f32).powi((1 + i * 7919 % 15) as i32 - 7) * if i % 3 % 2 == 1 { -1.0 } else { 1.0 },
    };
    let all = |count: usize, first: usize| (first..first + count).flat_map(encode).collect::<Vec<u8>>();
    let floats = |count: usize| (0..count).flat_map(|i| value(i + 3).to_le_bytes()).collect::<Vec<u8>>();
    let part = |columns: std::ops::Range<usize>| {
        (0..rows)
            .flat_map(|row| columns.clone().map(move |i| row * k + i))
            .flat_map(encode)
            .collect::<Vec<u8>>()
    };
    let x_right = upload(queue, &part(left..k));
    let (x, w) = (upload(queue, &part(0..left)), upload(queue, &all(batch * w_rows * k, 5)));
    let halves = (0..batch * rows * n).flat_map(|i| bf16::from_f32(value(i + 3)).to_le_bytes());
    let add = if end == End::Gated { halves.collect() } else { floats(batch * rows * n) };
    let (bias, add) = (upload(queue, &floats(batch * n)), upload(queue, &add));
    let scales = [upload(queue, &floats(w_rows)), upload(queue, &floats(rows))];
    let out = queue.allocate(batch * rows * n * 4).unwrap().unwrap();
    let shape = GemmShape {
        batch,
        stride_w: w_rows * k,
        stride_out: rows * n,
        ldx: if x_columns { rows } else { left },
        ldw: if w_columns { n } else { k },
        x_is_k_by_rows: x_columns,
        w_is_k_by_n: w_columns,
        right: k - left,
        gate: end == End::Gated,
        swiglu,
        ..GemmShape::packed([rows, n, k], dtype, out_dtype, added)
    };
    let operands = Operands {
        x_right: (left < k).then(|| x_right.ptr(queue)),
        gate: (end == End::Gated).then(|| bias.ptr(queue)),
        add: added.then(|| add.ptr(queue)),
        alpha: 0.5,
        bias: added.then(|| bias.ptr(queue)),
        scales: (dtype != DType::BF16).then(|| scales.each_ref().map(|scales| scales.ptr(queue))),
        ..Operands::new(x.ptr(queue), w.ptr(queue), out.ptr(queue))
    };
    assert!(supports(queue, &shape, &operands));
    for &tiling in tilings {
        queue.upload(&vec![0xff; batch * rows * n * 4], out.ptr(queue)).unwrap();
        launch(&shape, &operands, tiling).unwrap();
        let mut bytes = vec![0; batch * rows * n * 4];
        queue.download(out.ptr(queue), &mut bytes).unwrap();
        // Some rows and columns of each tile.
        for (b, row, column) in (0..2000).map(|i| (i % batch, i * 37 % rows, i * 101 % n)) {
            let at = |first: usize, columns: bool, lines: usize, line: usize, i: usize| {
                decode(first + if columns { i * lines + line } else { line * k + i })
            };
            let scaled = |column: usize| {
                let w = 5 + b * w_rows * k;
                let product = |i| at(0, x_columns, rows, row, i) * at(w, w_columns, n, column, i);
                let sum: f32 = (0..k).map(product).sum();
                let scale = if dtype == DType::BF16 { 1.0 } else { value(row + 3) * value(column + 3) };
                0.5 * scale * sum
            };
            let (sum, place) = (scaled(column), (b * rows + row) * n + column);
            let (row_value, summand) = (value(b * n + column + 3), value(place + 3));
            let expected = match end {
                End::Plain => sum,
                End::Added => sum + row_value + summand,
                End::Gated => (sum + row_value) * row_value + summand,
                End::Swiglu => sum / (1.0 + (-sum).exp()) * scaled(column + n),
            };
            let got = match out_dtype {
                DType::BF16 => bf16::from_le_bytes([bytes[2 * place], bytes[2 * place + 1]]).to_f32(),
                _ => f32::from_le_bytes(bytes[4 * place..][..4].try_into().unwrap()),
            };
            let relative = if out_dtype == DType::BF16 { 1.0 / 256.0 } else { 1e-5 };
            let tolerance = relative * expected.abs().max(2.0 * sum.abs()).max(100.0);
            assert!(
                (got - expected).abs() <= tolerance,
                "{dtype:?} {end:?} {tiling:?} {b} {row} {column}: {got} {expected}"
            );
        }
    }
}
