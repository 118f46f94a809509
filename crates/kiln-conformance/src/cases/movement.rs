//! Operations that move or convert data: upload, download, cast, reshape, slice, concatenate, patchify.

use kiln_ops::{Backend, Result, TrainingBackend};
use kiln_tensor::{DType, HostTensor};

use super::list::{CaseList, ODD};
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario};
use crate::random::{HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    list.add_once("upload/from_every_float_type", Upload);
    list.add_once("download_bytes/of_images", DownloadBytes);
    list.add_once("cast/rounds_to_nearest_even", Cast);
    list.add("reshape/keeps_the_order", Reshape);
    list.add("slice_rows/of_every_rank", SliceRows);
    list.add("slice_rows/of_a_slice", SliceOfSlice);
    list.add("concat_rows/odd_sizes", ConcatRows);
    list.add("write_rows/odd_sizes", WriteRows);
    list.add("concat_columns/odd_sizes", ConcatColumns);
    list.add("space_to_depth/odd_sizes", SpaceToDepth);
    list.add("depth_to_space/odd_sizes", DepthToSpace);
    list.add_once("invalid_arguments/movement", Invalid);
}

struct Upload;

impl Scenario for Upload {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for stored in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for n in ODD {
                let host = t.stored(HEAVY_TAILED, [n, 3], stored)?;
                for dtype in [DType::F32, DType::BF16] {
                    let x = t.b.upload(&host, dtype)?;
                    t.record_as(format!("{n}x3 of {stored} as {dtype}"), &x, dtype, Tolerance::EXACT)?;
                }
            }
        }
        let scalar = t.b.upload(&HostTensor::from_f32(Vec::new(), vec![2.5])?, DType::F32)?;
        t.record_as("a scalar", &scalar, DType::F32, Tolerance::EXACT)
    }
}

struct DownloadBytes;

impl Scenario for DownloadBytes {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        // Every tie between two bytes with its neighbours, values out of range, infinities and NaN.
        let tie = |i: u32| (i as f32 + 0.5) / 255.0;
        let near = (0..255).flat_map(|i| [-1, 0, 1].map(|d: i32| tie(i).to_bits().wrapping_add_signed(d)));
        let mut edges: Vec<f32> = near.map(f32::from_bits).collect();
        edges.extend([-0.0, 0.0, 1.0, -1.0, 2.0, 1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.25]);
        let mut hosts = vec![HostTensor::from_f32([edges.len()], edges)?];
        for n in ODD {
            let mut values = t.draw(NORMAL, [n, 3]).to_f32()?.into_owned();
            // The last value is neither black nor white, so that a lost element shows.
            values[3 * n - 1] = 0.125;
            hosts.push(HostTensor::from_f32([n, 3], values)?);
        }
        for host in hosts {
            for dtype in [DType::F32, DType::BF16] {
                let x = t.b.upload(&host.to_dtype(dtype)?, dtype)?;
                for (scale, shift) in [(1.0, 0.0), (0.5, 0.5)] {
                    let label = format!("{} elements of {dtype}, {scale} x + {shift}", host.numel());
                    let bytes = t.b.download_bytes(&x, scale, shift)?;
                    t.record_bytes(label, &bytes)?;
                }
            }
        }
        Ok(())
    }
}

struct Cast;

impl Scenario for Cast {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        // Ties round to even, just above a tie rounds up, and the largest f32 rounds to infinity.
        let bits = [
            0x3f80_8000u32,
            0x3f81_8000,
            0x3f80_8001,
            0x3f80_7fff,
            0xbf80_8000,
            0xbf81_8000,
            0x7f7f_ffff,
            0xff7f_ffff,
            0x7f80_0000,
            0xff80_0000,
            0x0000_0000,
            0x8000_0000,
            0x7f7f_0000,
            0x3eaa_aaab,
            0x4049_0fdb,
            0x0080_8000,
        ];
        let edges = HostTensor::from_f32([bits.len()], bits.map(f32::from_bits).to_vec())?;
        let mut hosts = vec![edges];
        for n in ODD {
            hosts.push(t.draw(HEAVY_TAILED, [n]));
        }
        for host in hosts {
            let x = t.b.upload(&host, DType::F32)?;
            let rounded = t.b.cast(&x, DType::BF16)?;
            let label = format!("{} elements", host.numel());
            t.record_as(format!("{label} to bf16"), &rounded, DType::BF16, Tolerance::EXACT)?;
            let back = t.b.cast(&rounded, DType::F32)?;
            t.record_as(format!("{label} and back"), &back, DType::F32, Tolerance::EXACT)?;
            t.record_as(
                format!("{label} as they are"),
                &t.b.cast(&x, DType::F32)?,
                DType::F32,
                Tolerance::EXACT,
            )?;
        }
        Ok(())
    }
}

struct Reshape;

impl Scenario for Reshape {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let x = t.activation(NORMAL, [6, 35])?;
        for shape in [vec![210], vec![7, 5, 6], vec![35, 6], vec![1, 210, 1]] {
            let y = t.b.reshape(&x, shape.clone().into())?;
            t.record(format!("to {shape:?}"), &y, Tolerance::EXACT)?;
        }
        // Operations on a reshaped tensor see the new shape.
        let y = t.b.concat_rows(&[&t.b.reshape(&x, [30, 7].into())?])?;
        t.record("then joined", &y, Tolerance::EXACT)
    }
}

struct SliceRows;

impl Scenario for SliceRows {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for inner in [vec![], vec![1], vec![33], vec![5, 3], vec![2, 3, 4]] {
            let shape: Vec<usize> = [9].into_iter().chain(inner).collect();
            let x = t.activation(NORMAL, shape.clone())?;
            for range in [0..9, 0..1, 8..9, 2..7, 4..4, 9..9] {
                let y = t.b.slice_rows(&x, range.clone())?;
                t.record(format!("{range:?} of {shape:?}"), &y, Tolerance::EXACT)?;
            }
        }
        Ok(())
    }
}

/// A backend may keep slices as views; views of views, and operations on them, must use the right offset.
struct SliceOfSlice;

impl Scenario for SliceOfSlice {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let x = t.activation(NORMAL, [20, 7])?;
        let y = t.b.slice_rows(&t.b.slice_rows(&x, 3..18)?, 5..9)?;
        t.record("rows 8..12", &y, Tolerance::EXACT)?;
        t.record("reshaped", &t.b.reshape(&y, [7, 4].into())?, Tolerance::EXACT)?;
        t.record("joined", &t.b.concat_rows(&[&y, &x, &y])?, Tolerance::EXACT)?;
        t.record("side by side", &t.b.concat_columns(&[&y, &y])?, Tolerance::EXACT)?;
        t.record("added", &t.b.add(&y, &t.b.slice_rows(&x, 0..4)?)?, Tolerance::ELEMENTWISE.rounded(t.dtype))
    }
}

struct ConcatRows;

impl Scenario for ConcatRows {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for dim in ODD {
            let parts = [1, 0, 17, 3].map(|rows| t.activation(NORMAL, [rows, dim]));
            let [a, b, c, d] = parts;
            let y = t.b.concat_rows(&[&a?, &b?, &c?, &d?])?;
            t.record(format!("{dim} columns"), &y, Tolerance::EXACT)?;
        }
        Ok(())
    }
}

/// Rows change in the tensor itself, and neither in its clones nor in its slices.
struct WriteRows;

impl Scenario for WriteRows {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for dim in ODD {
            let mut x = t.activation(NORMAL, [9, dim])?;
            for (first, count) in [(0, 1), (8, 1), (3, 4), (9, 0), (0, 9)] {
                let rows = t.activation(NORMAL, [count, dim])?;
                let (clone, slice) = (x.clone(), t.b.slice_rows(&x, 2..7)?);
                t.b.write_rows(&mut x, first, &rows)?;
                t.record(format!("{count} rows of {dim} at {first}"), &x, Tolerance::EXACT)?;
                t.record(format!("the clone of {dim} at {first}"), &clone, Tolerance::EXACT)?;
                t.record(format!("the slice of {dim} at {first}"), &slice, Tolerance::EXACT)?;
                drop((clone, slice));
                t.b.write_rows(&mut x, first / 2, &rows)?;
                t.record(format!("{count} rows of {dim} at {first} in place"), &x, Tolerance::EXACT)?;
            }
            // A slice is written at its own rows.
            let mut slice = t.b.slice_rows(&x, 4..8)?;
            drop(x);
            t.b.write_rows(&mut slice, 1, &t.activation(NORMAL, [2, dim])?)?;
            t.record(format!("a slice of {dim}"), &slice, Tolerance::EXACT)?;
        }
        Ok(())
    }
}

struct ConcatColumns;

impl Scenario for ConcatColumns {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for rows in [0, 1, 5, 65] {
            let parts = [1, 33, 16, 0, 7].map(|dim| t.activation(NORMAL, [rows, dim]));
            let [a, b, c, d, e] = parts;
            let y = t.b.concat_columns(&[&a?, &b?, &c?, &d?, &e?])?;
            t.record(format!("{rows} rows"), &y, Tolerance::EXACT)?;
        }
        Ok(())
    }
}

struct SpaceToDepth;

impl Scenario for SpaceToDepth {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for size in [[2, 2, 1], [2, 6, 3], [10, 2, 33], [4, 6, 32], [34, 30, 32]] {
            let x = t.activation(NORMAL, size)?;
            t.record(format!("{size:?}"), &t.b.space_to_depth(&x)?, Tolerance::EXACT)?;
        }
        Ok(())
    }
}

struct DepthToSpace;

impl Scenario for DepthToSpace {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for size in [[1, 1, 4], [1, 3, 12], [5, 1, 132], [2, 3, 128], [17, 15, 128]] {
            let x = t.activation(NORMAL, size)?;
            t.record(format!("{size:?}"), &t.b.depth_to_space(&x)?, Tolerance::EXACT)?;
        }
        Ok(())
    }
}

/// Calls that every backend must reject with the same message.
struct Invalid;

impl Scenario for Invalid {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let integers = HostTensor::new(DType::I32, [1], vec![0; 4].into())?;
        t.reject("integers", b.upload(&integers, DType::F32));
        t.reject("upload to f16", b.upload(&HostTensor::zeros([1]), DType::F16));
        let (x, narrow, half) =
            (t.zeros([4, 6], DType::F32)?, t.zeros([4, 5], DType::F32)?, t.zeros([4, 6], DType::BF16)?);
        let (short, flat) = (t.zeros([3, 6], DType::F32)?, t.zeros([6], DType::F32)?);
        let scalar = b.upload(&HostTensor::zeros(Vec::new()), DType::F32)?;
        t.reject("cast to f16", b.cast(&x, DType::F16));
        t.reject("cast to integers", b.cast(&x, DType::I32));
        t.reject("reshape to more", b.reshape(&x, [5, 5].into()));
        t.reject("reshape to too many", b.reshape(&x, [usize::MAX, 2].into()));
        t.reject("rows past the end", b.slice_rows(&x, 2..5));
        #[allow(clippy::reversed_empty_ranges)]
        t.reject("rows backwards", b.slice_rows(&x, 3..2));
        t.reject("rows of a scalar", b.slice_rows(&scalar, 0..0));
        t.reject("no rows to join", b.concat_rows(&[]));
        t.reject("rows of two widths", b.concat_rows(&[&x, &narrow]));
        t.reject("rows of two types", b.concat_rows(&[&x, &half]));
        t.reject("vectors below each other", b.concat_rows(&[&flat, &flat]));
        let mut to = t.zeros([4, 6], DType::F32)?;
        t.reject("written rows past the end", b.write_rows(&mut to, 2, &short));
        t.reject("written rows of another width", b.write_rows(&mut to, 0, &narrow));
        t.reject("written rows of another type", b.write_rows(&mut to, 0, &half));
        t.reject("a vector to write", b.write_rows(&mut to, 0, &flat));
        t.reject("no columns to join", b.concat_columns(&[]));
        t.reject("columns of two heights", b.concat_columns(&[&x, &short]));
        t.reject("columns of two types", b.concat_columns(&[&x, &half]));
        t.reject("vectors side by side", b.concat_columns(&[&flat]));
        t.reject("space_to_depth: odd height", b.space_to_depth(&t.zeros([3, 2, 4], DType::F32)?));
        t.reject("space_to_depth: odd width", b.space_to_depth(&t.zeros([2, 3, 4], DType::F32)?));
        t.reject("space_to_depth: a matrix", b.space_to_depth(&t.zeros([2, 2], DType::F32)?));
        t.reject("depth_to_space: 6 channels", b.depth_to_space(&t.zeros([2, 2, 6], DType::F32)?));
        t.reject("depth_to_space: a matrix", b.depth_to_space(&t.zeros([2, 4], DType::F32)?));
        Ok(())
    }
}
