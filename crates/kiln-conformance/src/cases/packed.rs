//! Linear layers with packed weights: every format, alone and stacked with others.

use kiln_ops::{Backend, Result, RowGroups, TrainingBackend};
use kiln_tensor::packed::{BlockScales, Format, PackedTensor, TileScales};
use kiln_tensor::{DType, HostLinear};

use super::list::CaseList;
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario, load};
use crate::random::NORMAL;

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    for format in Format::all() {
        list.add(&format!("linear_packed/{format}"), SingleFormat(format));
    }
    list.add("linear_packed/f8_e4m3_tiles", TileScaled);
    list.add("linear_packed/stack", StackedFormats);
    list.add("linear_gated_add_packed/side_by_side", GatedAdd);
}

/// Packed weights are not exact in bf16, but a backend may keep them in that type.
fn tolerance(dtype: DType, terms: usize) -> Tolerance {
    match dtype {
        DType::BF16 => Tolerance::sum(terms).rounded_inside(dtype),
        _ => Tolerance::sum(terms),
    }
}

/// Byte offsets of the f16 scales in a block.
fn f16_scales(format: Format) -> &'static [usize] {
    match format {
        Format::Q4_0 | Format::Q5_0 | Format::Q8_0 | Format::Iq4Nl | Format::Iq4Xs => &[0],
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q2K => &[80, 82],
        Format::Q3K => &[108],
        Format::Q6K => &[208],
        _ => &[],
    }
}

/// Draws a matrix of arbitrary bits, with scales that give values of about one.
pub(super) fn matrix<B: Backend>(
    t: &mut CaseRun<'_, B>,
    format: Format,
    [rows, cols]: [usize; 2],
) -> Result<PackedTensor> {
    if let Some(dtype) =
        [(Format::F32, DType::F32), (Format::BF16, DType::BF16)].iter().find(|d| d.0 == format)
    {
        return Ok(PackedTensor::from_dense(&t.stored(NORMAL, [rows, cols], dtype.1)?)?);
    }
    let size = rows * cols / format.block_values() * format.block_bytes();
    let mut data = t.bytes(size);
    for block in data.chunks_exact_mut(format.block_bytes()) {
        for scale in f16_scales(format) {
            // 2⁻⁵ to 2⁻⁴, of either sign.
            block[scale + 1] = block[scale + 1] & 0x83 | 0x28;
        }
    }
    if matches!(format, Format::F16 | Format::F8E5M2) {
        // No infinities.
        data.iter_mut().for_each(|byte| *byte &= 0xbb);
    }
    if format == Format::F8E4M3 {
        data.iter_mut().filter(|byte| **byte & 0x7f == 0x7f).for_each(|byte| *byte = 0);
    }
    let packed = PackedTensor::new(format, [rows, cols], data.into())?;
    Ok(match format {
        Format::F8E4M3 | Format::I8 => {
            packed.with_row_scales(&t.draw(NORMAL.scaled(0.001).shifted(0.01), [rows]).to_f32()?)?
        }
        Format::F8E5M2 => packed.with_scale(0.01),
        Format::NvFp4 => {
            let mut scales =
                BlockScales { scales: Default::default(), swizzled: true, high_first: true, global: 0.02 };
            let count = scales.expected_len([rows, cols]).unwrap_or(0);
            scales.scales = t.bytes(count).iter().map(|b| b & 0x3f | 0x10).collect::<Vec<_>>().into();
            packed.with_block_scales(scales)?
        }
        _ => packed,
    })
}

/// A single matrix.
struct SingleFormat(Format);

impl Scenario for SingleFormat {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for [rows, cols, out] in [[1, 256, 3], [4, 512, 18], [6, 256, 33], [17, 768, 65], [40, 1280, 7]] {
            let x = t.activation(NORMAL, [rows, cols])?;
            let layer = HostLinear::packed(vec![matrix(t, self.0, [out, cols])?])?;
            let y = t.b.linear(&x, &load(t.b, layer)?)?;
            t.record(format!("{rows}x{cols} to {out}"), &y, tolerance(t.dtype, cols))?;
        }
        Ok(())
    }
}

/// fp8 with a scale per tile: whole matrices, and rows whose first is inside of a tile.
struct TileScaled;

impl Scenario for TileScaled {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for [rows, cols, out, first, tile] in
            [[3, 256, 130, 0, 128], [4, 200, 300, 100, 128], [33, 96, 65, 17, 16], [1, 640, 7, 3, 64]]
        {
            let x = t.activation(NORMAL, [rows, cols])?;
            let count = out.div_ceil(tile) * cols.div_ceil(tile);
            let scales = t.draw(NORMAL.scaled(0.003).shifted(0.01), [count]).to_f32()?.into_owned();
            let matrix = matrix(t, Format::F8E4M3, [out, cols])?;
            let tiled = matrix.with_tile_scales(TileScales { scales: scales.into(), tile: [tile, tile] })?;
            let layer = HostLinear::packed(vec![tiled.rows(first..out)?])?;
            let y = t.b.linear(&x, &load(t.b, layer)?)?;
            t.record(format!("{rows}x{cols} to {out}"), &y, tolerance(t.dtype, cols))?;
        }
        Ok(())
    }
}

/// Several matrices of different formats as one layer, such as query, key and value.
struct StackedFormats;

impl Scenario for StackedFormats {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for rows in [0, 2, 33] {
            let cols = 512;
            let x = t.activation(NORMAL, [rows, cols])?;
            let formats = [(Format::Q4K, 31), (Format::BF16, 5), (Format::Q6K, 64), (Format::F8E4M3, 1)];
            let packed = formats.map(|(format, out)| matrix(t, format, [out, cols]));
            let packed = packed.into_iter().collect::<Result<Vec<_>>>()?;
            let layer = HostLinear::packed(packed)?.with_bias(t.stored(NORMAL, [101], DType::F32)?)?;
            let y = t.b.linear_split(&x, &load(t.b, layer)?, [40, 61])?;
            for (i, y) in y.iter().enumerate() {
                t.record(format!("{rows} rows, part {i}"), y, tolerance(t.dtype, cols))?;
            }
        }
        Ok(())
    }
}

struct GatedAdd;

impl Scenario for GatedAdd {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (rows, out, lengths) = (20, 37, [1, 17, 2]);
        let xs = [t.activation(NORMAL, [rows, 96])?, t.activation(NORMAL, [rows, 160])?];
        let w = load(t.b, HostLinear::packed(vec![matrix(t, Format::Q8_0, [out, 256])?])?)?;
        let (gate, groups) = (t.parameter(NORMAL, [3, out])?, RowGroups::from_lengths(&lengths));
        let residual = t.activation(NORMAL, [rows, out])?;
        let y = t.b.linear_gated_add(&[&xs[0], &xs[1]], &w, Some((&gate, &groups)), &residual)?;
        t.record("gated", &y, tolerance(t.dtype, 256))
    }
}
