//! The cursor through which a model loads its tensors and linear layers, with every shape checked.

use std::fmt::Display;
use std::sync::Arc;

use kiln_tensor::packed::PackedTensor;
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Rotation, Shape};

use crate::lora::WeightPatch;
use crate::source_tensor::RowBlock;
use crate::{Error, LayerShape, LinearPrecision, LoraUpdates, PageRanges, Result, WeightSource, int8};

/// A cursor into a source: `vars.at("transformer_blocks").at(3)` sees the tensors under that name.
///
/// It also holds the precision of linear layers, and the LoRAs to apply to them.
#[derive(Clone, Debug)]
pub struct Vars<'a> {
    source: &'a WeightSource,
    precision: LinearPrecision,
    loras: Option<&'a LoraUpdates>,
    prefix: String,
}

impl<'a> Vars<'a> {
    pub(crate) fn new(source: &'a WeightSource) -> Self {
        Vars { source, precision: LinearPrecision::Float, loras: None, prefix: String::new() }
    }

    /// The precision of the linear layers.
    pub fn precision(&self) -> LinearPrecision {
        self.precision
    }

    /// The same cursor with linear layers in this precision.
    pub fn with_precision(self, precision: LinearPrecision) -> Vars<'a> {
        Vars { precision, ..self }
    }

    /// The same cursor with these LoRAs, which were resolved against its source, applied to the linear layers.
    pub fn with_loras(self, loras: &'a LoraUpdates) -> Vars<'a> {
        Vars { loras: Some(loras), ..self }
    }

    /// The cursor at the top, with the same precision and LoRAs.
    pub fn root(&self) -> Vars<'a> {
        Vars { prefix: String::new(), ..self.clone() }
    }

    /// The cursor one level down.
    pub fn at(&self, name: impl Display) -> Vars<'a> {
        Vars { prefix: self.name(&name.to_string()), ..self.clone() }
    }

    /// The full name of `leaf`; the prefix for an empty leaf.
    pub fn name(&self, leaf: &str) -> String {
        match (self.prefix.as_str(), leaf) {
            ("", _) => leaf.to_owned(),
            (prefix, "") => prefix.to_owned(),
            (prefix, _) => format!("{prefix}.{leaf}"),
        }
    }

    /// Whether there is a tensor `leaf` here.
    pub fn contains(&self, leaf: &str) -> bool {
        self.source.contains(&self.name(leaf))
    }

    /// The source it points into.
    pub fn source(&self) -> &'a WeightSource {
        self.source
    }

    /// The pages of the tensors below here, for prefetching; without those that were quantized to int8 when they were loaded
    /// and are not read again.
    pub fn page_ranges(&self) -> PageRanges {
        self.source.page_ranges(&format!("{}.", self.prefix), self.precision)
    }

    /// The tensor `leaf`, which must have this shape.
    pub fn tensor(&self, leaf: &str, shape: impl Into<Shape>) -> Result<HostTensor> {
        self.source.tensor_with_shape(&self.name(leaf), shape.into())
    }

    /// The tensor `leaf`, which must have this shape and no NaN or infinity.
    pub fn finite_tensor(&self, leaf: &str, shape: impl Into<Shape>) -> Result<HostTensor> {
        let tensor = self.tensor(leaf, shape)?;
        if tensor.is_finite() {
            return Ok(tensor);
        }
        Err(Error::NotFinite { file: self.source.path().to_owned(), tensor: self.name(leaf) })
    }

    /// The matrix `leaf`, which must have this shape, packed as stored; for tables of which only some rows are read.
    pub fn matrix(&self, leaf: &str, shape: [usize; 2]) -> Result<PackedTensor> {
        let name = self.name(leaf);
        let unusable =
            |source| Error::Tensor { file: self.source.path().to_owned(), tensor: name.clone(), source };
        let mut blocks = self.source.row_blocks(&name, shape.into())?;
        match blocks.pop() {
            Some(block) if blocks.is_empty() => block.into_packed().map_err(unusable),
            _ => PackedTensor::from_dense(&self.source.tensor_with_shape(&name, shape.into())?)
                .map_err(unusable),
        }
    }

    /// The linear layer `leaf`: the matrix `{leaf}.weight` of `[rows, cols]`, the bias `{leaf}.bias` of `[rows]` if
    /// there is one, and the updates of the LoRAs for it.
    pub fn linear(&self, leaf: &str, rows: usize, cols: usize) -> Result<HostLinear> {
        self.linear_stack(&[(leaf, rows)], cols)
    }

    /// Several linear layers of the same input (q, k, v), given with their rows, stacked to one.
    ///
    /// The weights are not copied, unless their dtypes differ: then all become f32. Either all layers have a bias or none;
    /// LoRA updates apply to the rows of their own layer.
    pub fn linear_stack(&self, leaves: &[(&str, usize)], cols: usize) -> Result<HostLinear> {
        let rotation = self.int8_rotation(leaves, cols);
        let with_bias = leaves.iter().any(|(leaf, _)| self.at(leaf).contains("bias"));
        let (mut blocks, mut scales) = (Vec::new(), Vec::new());
        let mut biases = Vec::new();
        for &(leaf, rows) in leaves {
            let layer = self.at(leaf);
            let (name, size) = (layer.name("weight"), [rows, cols]);
            let patch = match self.loras {
                Some(loras) => loras.patch(&layer.shape("", rows, cols))?,
                None => None,
            };
            let quantized = match (self.precision.int8_threads(&layer.prefix), &patch) {
                (None, _) => None,
                (Some(threads), None) => Some(self.source.int8(&name, size.into(), rotation, threads)?),
                (Some(threads), Some(_)) => {
                    let unusable = |source| Error::Tensor {
                        file: self.source.path().to_owned(),
                        tensor: name.clone(),
                        source,
                    };
                    let patched = to_dense(&layer.row_blocks(size, &patch)?).map_err(unusable)?;
                    Some(self.source.quantize_matrix(&name, &patched, rotation, threads)?)
                }
            };
            match quantized {
                Some(quantized) => {
                    blocks.push(RowBlock::Dense(quantized.weight));
                    scales.push(quantized.scale);
                }
                None => blocks.extend(layer.row_blocks(size, &patch)?),
            }
            if with_bias {
                biases.push(layer.tensor("bias", [rows])?);
            }
        }
        let module = || self.name(&leaves.iter().map(|(leaf, _)| *leaf).collect::<Vec<_>>().join("+"));
        let file = || self.source.path().to_owned();
        let linear = |source| Error::Linear { file: file(), module: module(), source };
        let tensor = |source| Error::Tensor { file: file(), tensor: module(), source };

        let bias = with_bias.then(|| concatenate(&biases)).transpose().map_err(tensor)?;
        let fp8 = leaves.iter().all(|(leaf, _)| self.has_fp8_matmul(&self.name(leaf)));
        let nvfp4 = self.precision == LinearPrecision::Stored { nvfp4: true }
            && leaves.iter().all(|(leaf, _)| self.source.stores_nvfp4(&self.name(leaf)));
        let deltas = self.deltas(leaves, cols)?;
        let stack = unify(blocks).map_err(tensor)?;
        // A patched weight is not.
        let nvfp4 =
            nvfp4 && matches!(&stack, Stack::Packed(packed) if packed.iter().all(PackedTensor::is_nvfp4));
        let layer = match stack {
            Stack::Dense(blocks) if scales.is_empty() => HostLinear::dense(blocks),
            Stack::Dense(rows) => HostLinear::int8(rows, scales, rotation),
            Stack::Packed(packed) => HostLinear::packed(packed),
        };
        let layer = layer.and_then(|layer| layer.with_bias(bias)?.with_deltas(deltas));
        let layer = layer.and_then(|layer| match (fp8, nvfp4) {
            (true, _) => layer.with_fp8_matmul(),
            (_, true) => layer.with_nvfp4_matmul(),
            _ => Ok(layer),
        });
        layer.map_err(linear)
    }

    /// How such a stack is rotated if it is used in int8: one way for all of it, and not if a layer is stored in int8, which
    /// is used as it is.
    fn int8_rotation(&self, leaves: &[(&str, usize)], cols: usize) -> Rotation {
        let stored = |leaf: &str| self.source.is_int8(&self.at(leaf).name("weight"));
        if leaves.iter().any(|(leaf, _)| stored(leaf)) { Rotation::None } else { Rotation::for_width(cols) }
    }

    /// The weight of the layer here, without a copy; a patch is applied where it is read.
    fn row_blocks(
        &self,
        size: [usize; 2],
        patch: &Option<(Arc<WeightPatch>, DType)>,
    ) -> Result<Vec<RowBlock>> {
        let name = self.name("weight");
        let blocks = self.source.row_blocks(&name, size.into())?;
        let Some((patch, dtype)) = patch else { return Ok(blocks) };
        let mut first_row = 0;
        let patched = |block: RowBlock| {
            let matrix = block.into_packed()?;
            let at = first_row;
            first_row += matrix.row_count();
            Ok(RowBlock::Packed(matrix.patched(patch.clone(), at, *dtype)))
        };
        let patched = blocks.into_iter().map(patched).collect::<kiln_tensor::Result<_>>();
        patched.map_err(|source| Error::Tensor { file: self.source.path().to_owned(), tensor: name, source })
    }

    /// Whether the layer of this full name is multiplied in fp8.
    fn has_fp8_matmul(&self, module: &str) -> bool {
        match self.precision {
            LinearPrecision::Fp8 => int8::is_block_layer(module),
            LinearPrecision::Stored { .. } => self.source.stores_fp8(module),
            LinearPrecision::Float | LinearPrecision::Int8 { .. } => false,
        }
    }

    /// The updates that LoRAs add to the output of such a stack.
    pub fn deltas(&self, leaves: &[(&str, usize)], cols: usize) -> Result<Vec<LoraDelta>> {
        let Some(loras) = self.loras else { return Ok(Vec::new()) };
        let stack: Vec<_> = leaves.iter().map(|&(leaf, rows)| self.shape(leaf, rows, cols)).collect();
        loras.deltas(&stack)
    }

    /// Whether LoRAs patch a weight of such a stack, so that it has to be loaded again when they change.
    pub fn is_merged(&self, leaves: &[(&str, usize)], cols: usize) -> bool {
        let patches = |loras: &LoraUpdates| {
            leaves.iter().any(|&(leaf, rows)| loras.patches(&self.shape(leaf, rows, cols)))
        };
        self.loras.is_some_and(patches)
    }

    fn shape(&self, leaf: &str, rows: usize, cols: usize) -> LayerShape {
        LayerShape { name: self.name(leaf), rows, cols }
    }
}

/// The weights of stacked layers.
enum Stack {
    Dense(Vec<HostTensor>),
    Packed(Vec<PackedTensor>),
}

/// All values of row blocks, as f32.
fn to_dense(blocks: &[RowBlock]) -> kiln_tensor::Result<HostTensor> {
    let (mut rows, mut values) = (0, Vec::new());
    for block in blocks {
        let matrix = block.clone().into_packed()?;
        rows += matrix.row_count();
        values.extend_from_slice(&matrix.to_f32()?.to_f32()?);
    }
    HostTensor::from_f32([rows, values.len() / rows.max(1)], values)
}

/// Makes all blocks packed if one is, else gives all the same dtype.
fn unify(blocks: Vec<RowBlock>) -> kiln_tensor::Result<Stack> {
    if blocks.iter().any(|block| matches!(block, RowBlock::Packed(_))) {
        return blocks.into_iter().map(RowBlock::into_packed).collect::<Result<_, _>>().map(Stack::Packed);
    }
    let dense = blocks.into_iter().filter_map(|block| match block {
        RowBlock::Dense(dense) => Some(dense),
        RowBlock::Packed(_) => None,
    });
    unify_dtypes(dense.collect()).map(Stack::Dense)
}

fn unify_dtypes(tensors: Vec<HostTensor>) -> kiln_tensor::Result<Vec<HostTensor>> {
    if tensors.windows(2).all(|pair| pair[0].dtype() == pair[1].dtype()) {
        return Ok(tensors);
    }
    tensors.iter().map(|t| t.to_dtype(DType::F32)).collect()
}

/// Concatenates vectors; a single one is not copied.
fn concatenate(vectors: &[HostTensor]) -> kiln_tensor::Result<HostTensor> {
    let vectors = unify_dtypes(vectors.to_vec())?;
    if let [one] = &vectors[..] {
        return Ok(one.clone());
    }
    let bytes: Vec<u8> = vectors.iter().flat_map(|v| v.bytes().iter().copied()).collect();
    let dtype = vectors.first().map_or(DType::F32, HostTensor::dtype);
    HostTensor::new(dtype, [vectors.iter().map(HostTensor::numel).sum()], bytes.into())
}

impl WeightSource {
    /// A cursor at the top, with linear layers as floats and without LoRAs.
    pub fn root(&self) -> Vars<'_> {
        Vars::new(self)
    }
}
