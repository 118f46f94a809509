//! Products with weights: which kernel, how many pieces, and what happens to the sums.
//!
//! All products go through [`Product::launch`]. A faster kernel for some adapters, such as one for cooperative matrices, is another
//! [`Kernel`] that `kernel` chooses for the shapes it takes.

use std::ops::Range;

use kiln_ops::{Result, Tensor};

use crate::context::{Context, Launch, Param, Window, u};
use crate::device::{AdapterKind, DeviceBuffer};
use crate::kernels::{ACTIVATIONS, Kernel, Number, Value, Word};
use crate::tensor::WgpuTensor;
use crate::weight::{Columns, Part};

const SOURCE: &str = include_str!("../../kernels/product.wgsl");

/// The tiles of `product.wgsl`.
const TILES: &[Value] = &[Word("few"), Word("small"), Word("large"), Word("narrow")];

pub(super) const PRODUCT: Kernel = Kernel {
    name: "product",
    source: SOURCE,
    constants: &[
        ("X", ACTIVATIONS),
        ("Y", ACTIVATIONS),
        (
            "W",
            &[
                Word("f32"),
                Word("bf16"),
                Word("f16"),
                Word("q4_0"),
                Word("q4_1"),
                Word("q5_0"),
                Word("q5_1"),
                Word("q8_0"),
                Word("q2_k"),
                Word("q3_k"),
                Word("q4_k"),
                Word("q5_k"),
                Word("q6_k"),
                Word("iq4_nl"),
                Word("iq4_xs"),
                Word("f8_e4m3"),
                Word("f8_e5m2"),
                Word("f8_e4m3_tiles"),
                Word("f8_e5m2_tiles"),
                Word("nvfp4"),
                Word("int8"),
            ],
        ),
        ("TILE", TILES),
        ("INPUT", &[Word("matrix")]),
    ],
};

pub(super) const CONVOLUTION: Kernel = Kernel {
    name: "convolution",
    source: SOURCE,
    constants: &[
        ("X", ACTIVATIONS),
        ("Y", ACTIVATIONS),
        ("W", &[Word("f32"), Word("bf16"), Word("f16")]),
        ("TILE", TILES),
        ("INPUT", &[Word("image")]),
    ],
};

pub(super) const PRODUCT_INT8: Kernel = Kernel {
    name: "product_int8",
    source: include_str!("../../kernels/product_int8.wgsl"),
    constants: &[("Y", ACTIVATIONS), ("TM", &[Number(1), Number(4)])],
};

/// What is multiplied with the rows of a weight.
#[derive(Clone, Copy)]
pub(super) enum Input<'a> {
    /// `[rows, in]`.
    Matrix(&'a WgpuTensor),
    /// Four integers to a word: `[rows, in / 4]`.
    Words(&'a WgpuTensor),
    /// The patches of an image.
    Image(&'a WgpuTensor, &'a Patches),
}

/// Where a convolution reads its image.
pub(super) struct Patches {
    /// `[height, width, channels]` of the image.
    pub size: [usize; 3],
    /// Rows and columns of the kernel.
    pub kernel: [usize; 2],
    /// Columns of the result.
    pub width: usize,
    pub stride: usize,
    pub top: usize,
    pub left: usize,
    pub upsample: bool,
}

/// `[groups, out]`, and the group of some rows.
pub(super) type Gate<'a> = (&'a WgpuTensor, usize);

/// A product and what happens to its sums (`epilogue.wgsl`).
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub input: Input<'a>,
    /// Columns of the weight.
    pub inner: usize,
    /// Output columns of the whole layer.
    pub out: usize,
    pub columns: Option<&'a Columns>,
    pub row_scales: Option<&'a WgpuTensor>,
    pub gate: Option<Gate<'a>>,
    pub residual: Option<&'a WgpuTensor>,
    /// Whether the sums are added to the result so far.
    pub accumulate: bool,
    pub scale: f32,
}

/// A result: some output columns, `[rows, columns.len()]`.
pub(super) struct Output<'a> {
    pub tensor: &'a WgpuTensor,
    pub columns: Range<usize>,
}

impl Product<'_> {
    /// Multiplies the input's `rows` with a weight, and writes the results.
    pub fn run(
        &self,
        cx: &Context,
        parts: &[Part],
        outputs: &[Output<'_>],
        rows: Range<usize>,
    ) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        for part in parts {
            let wanted =
                outputs.iter().filter(|output| !intersect(&part.range(), &output.columns).is_empty());
            let wanted: Vec<_> = wanted.collect();
            if wanted.is_empty() {
                continue;
            }
            let buffer = part.buffer(cx)?;
            for output in wanted {
                self.launch(cx, part, &buffer, output, rows.clone())?;
            }
        }
        Ok(())
    }

    /// Multiplies with the rows of one part that are columns of one output.
    fn launch(
        &self,
        cx: &Context,
        part: &Part,
        buffer: &DeviceBuffer,
        output: &Output<'_>,
        rows: Range<usize>,
    ) -> Result<()> {
        let columns = intersect(&part.range(), &output.columns);
        let y_stride = output.columns.len();
        let weight = Window {
            buffer,
            start: (columns.start - part.first) * part.stride * 4,
            bytes: columns.len() * part.stride * 4,
            element: 4,
        };
        let (kernel, values, tile) = self.kernel(cx, part, output, rows.len());
        let row_cost = 2 * (self.inner * columns.len()) as u64;
        // An image's rows can't be cut: its chunks are whole rows of the result.
        let (unit, unit_bytes) = match self.input {
            Input::Matrix(x) => (1, self.inner * x.dtype().size()),
            Input::Words(x) => (1, x.shape().last() * 4),
            Input::Image(x, patches) => (patches.width, patches.unit_bytes(x)),
        };
        let unit_bytes = unit_bytes.max(unit * y_stride * 4);
        let units = rows.start / unit..rows.end / unit;
        for chunk in cx.row_chunks(units, unit_bytes, unit as u64 * row_cost) {
            let chunk = chunk.start * unit..chunk.end * unit;
            let y = output.tensor.rows(&chunk, y_stride);
            let (x, inner, shape) = match self.input {
                Input::Matrix(x) => (x.rows(&chunk, self.inner), self.inner, None),
                Input::Words(x) => (x.rows(&chunk, x.shape().last()), x.shape().last(), None),
                Input::Image(x, patches) => {
                    let (window, first) = patches.window(x, &chunk);
                    (window, self.inner, Some((patches, chunk.start / unit, first)))
                }
            };
            let tensors = [
                x,
                weight,
                self.columns.and_then(|columns| columns.values.as_ref()).map_or(x, WgpuTensor::window),
                self.row_scales.map_or(x, |scales| scales.rows(&chunk, 1)),
                self.gate.map_or(x, |(gate, group)| gate.rows(&(group..group + 1), self.out)),
                self.residual.map_or(x, |residual| residual.rows(&chunk, y_stride)),
                y,
            ];
            let mut params = vec![
                ("rows", u(chunk.len())),
                ("inner", u(inner)),
                ("outputs", u(columns.len())),
                ("stride", u(part.stride)),
            ];
            if !matches!(self.input, Input::Words(_)) {
                params.push(("tile", u(part.tile)));
            }
            params.extend([
                ("first_column", u(columns.start)),
                ("all_columns", u(self.out)),
                ("y_stride", u(y_stride)),
                ("y_column", u(columns.start - output.columns.start)),
                ("flags", self.flags()),
                ("scale", Param::F32(self.scale)),
            ]);
            if let Some((patches, first_row, image_first)) = shape {
                params.extend(patches.params(first_row, image_first));
            }
            cx.launch(&Launch {
                kernel,
                values: &values,
                tensors: &tensors,
                params: &params,
                groups: chunk.len().div_ceil(tile[0]) * columns.len().div_ceil(tile[1]),
                cost: chunk.len() as u64 * row_cost,
            })?;
        }
        Ok(())
    }

    /// The kernel for a number of rows, its constants, and rows and columns of its tiles.
    fn kernel(
        &self,
        cx: &Context,
        part: &Part,
        output: &Output<'_>,
        rows: usize,
    ) -> (&'static Kernel, Vec<Value>, [usize; 2]) {
        let y = output.tensor.element();
        let few = rows <= 16;
        let (x, kernel, input) = match self.input {
            Input::Words(_) => {
                let each = if few { 1 } else { 4 };
                return (&PRODUCT_INT8, vec![y, Number(each)], [16 * each as usize, 64]);
            }
            Input::Matrix(x) => (x, &PRODUCT, "matrix"),
            Input::Image(x, _) => (x, &CONVOLUTION, "image"),
        };
        // Large tiles need enough work for all processors; a CPU has few, and its accesses of workgroup memory are slow.
        let large = match cx.gpu().adapter.kind {
            AdapterKind::Cpu => rows > 64 && part.rows > 64,
            _ => rows >= 512 && part.rows >= 512,
        };
        let (tile, size) = match (few, part.rows <= 32 && rows >= 256) {
            (true, _) => ("few", [16, 64]),
            (_, true) => ("narrow", [256, 32]),
            _ if large => ("large", [128, 128]),
            _ => ("small", [64, 64]),
        };
        (kernel, vec![x.element(), y, Word(part.format), Word(tile), Word(input)], size)
    }

    fn flags(&self) -> Param {
        let columns = self.columns.map_or((false, false), |columns| (columns.has_scales, columns.has_bias));
        let all = [
            self.row_scales.is_some(),
            columns.0,
            columns.1,
            self.gate.is_some(),
            self.residual.is_some(),
            self.accumulate,
        ];
        Param::U32(all.iter().enumerate().map(|(bit, &set)| u32::from(set) << bit).sum())
    }
}

impl Patches {
    /// Bytes of the image's rows that a row of the result is made of.
    fn unit_bytes(&self, x: &WgpuTensor) -> usize {
        let [_, width, channels] = self.size;
        // A chunk of rows has the kernel's other rows besides.
        (self.stride + self.kernel[0]) * width * channels * x.dtype().size()
    }

    /// The image's rows that some pixels of the result are made of, and the first one.
    fn window<'a>(&self, x: &'a WgpuTensor, pixels: &Range<usize>) -> (Window<'a>, usize) {
        let [height, width, channels] = self.size;
        let shift = u32::from(self.upsample);
        let first = pixels.start / self.width * self.stride;
        let last = (pixels.end / self.width - 1) * self.stride + self.kernel[0] - 1;
        let row = |padded: usize| (padded.saturating_sub(self.top) >> shift).min(height.saturating_sub(1));
        let rows = row(first)..(row(last) + 1).min(height);
        (x.rows(&rows, width * channels), rows.start)
    }

    fn params(&self, first_row: usize, image_first: usize) -> [(&'static str, Param); 11] {
        let [height, width, channels] = self.size;
        let signed = |n: usize| Param::I32(i32::try_from(n).unwrap_or(i32::MAX));
        [
            ("width", u(self.width)),
            ("channels", u(channels)),
            ("kernel_width", u(self.kernel[1])),
            ("step", u(self.stride)),
            ("top", signed(self.top)),
            ("left", signed(self.left)),
            ("doubled", u(usize::from(self.upsample))),
            ("first_row", signed(first_row)),
            ("image_first", signed(image_first)),
            ("image_height", u(height)),
            ("image_width", u(width)),
        ]
    }
}

fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}
