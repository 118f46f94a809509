use std::fmt::Display;
use std::sync::Arc;

use kiln_tensor::packed::Packed;
use kiln_tensor::{DType, Delta, HostTensor, LinearParts, Shape};

use crate::lora::Merged;
use crate::placed::Slab;
use crate::{Error, LayerShape, LinearForm, LoraUpdates, Pages, Result, WeightSource, int8};

/// A cursor into a source: `vars.at("transformer_blocks").at(3)` sees the tensors under that name.
///
/// It also knows in which form linear layers are wanted, and the LoRAs to lay over them.
#[derive(Clone, Debug)]
pub struct Vars<'a> {
    source: &'a WeightSource,
    form: LinearForm,
    loras: Option<&'a LoraUpdates>,
    prefix: String,
}

impl<'a> Vars<'a> {
    pub(crate) fn new(source: &'a WeightSource) -> Self {
        Vars { source, form: LinearForm::Float, loras: None, prefix: String::new() }
    }

    /// The same cursor with linear layers in this form.
    pub fn with_form(self, form: LinearForm) -> Vars<'a> {
        Vars { form, ..self }
    }

    /// The same cursor with these LoRAs, which were resolved against its source, laid over the linear layers.
    pub fn with_loras(self, loras: &'a LoraUpdates) -> Vars<'a> {
        Vars { loras: Some(loras), ..self }
    }

    /// The cursor at the top, in the same form and with the same LoRAs.
    pub fn root(&self) -> Vars<'a> {
        Vars { prefix: String::new(), ..self.clone() }
    }

    /// The cursor one name further down.
    pub fn at(&self, name: impl Display) -> Vars<'a> {
        Vars { prefix: self.name(&name.to_string()), ..self.clone() }
    }

    /// The whole name of `leaf` here; of an empty leaf, the prefix.
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

    /// Where the tensors below here lie in their mapped files, for reading ahead; without those that were rounded to 8 bits
    /// when they were loaded and are not read again.
    pub fn pages(&self) -> Pages {
        self.source.pages(&format!("{}.", self.prefix), self.form)
    }

    /// The tensor `leaf`, which must have this shape.
    pub fn tensor(&self, leaf: &str, shape: impl Into<Shape>) -> Result<HostTensor> {
        self.source.tensor_of(&self.name(leaf), shape.into())
    }

    /// The matrix `leaf`, which must have this shape, packed as it is; for tables of which only some rows are read.
    pub fn matrix(&self, leaf: &str, shape: [usize; 2]) -> Result<Packed> {
        let name = self.name(leaf);
        let unusable =
            |source| Error::Tensor { file: self.source.path().to_owned(), tensor: name.clone(), source };
        let mut slabs = self.source.slabs(&name, shape.into())?;
        match slabs.pop() {
            Some(slab) if slabs.is_empty() => slab.into_packed().map_err(unusable),
            _ => Packed::from_dense(&self.source.tensor_of(&name, shape.into())?).map_err(unusable),
        }
    }

    /// The tensor `leaf`, whatever its shape.
    pub fn tensor_any(&self, leaf: &str) -> Result<HostTensor> {
        self.source.tensor(&self.name(leaf))
    }

    /// The linear layer `leaf`: the matrix `{leaf}.weight` of `[rows, cols]`, the bias `{leaf}.bias` of `[rows]` if
    /// there is one, and the updates of the LoRAs for it.
    pub fn linear(&self, leaf: &str, rows: usize, cols: usize) -> Result<LinearParts> {
        self.linear_stack(&[(leaf, rows)], cols)
    }

    /// Several linear layers of the same input (q, k, v), given with their rows, as one whose rows they stack.
    ///
    /// The weights are not copied (unless their dtypes differ: then all become f32). Either each layer has a bias or
    /// none; LoRA updates keep to the rows of the layer they are for.
    pub fn linear_stack(&self, leaves: &[(&str, usize)], cols: usize) -> Result<LinearParts> {
        let with_bias = leaves.iter().any(|(leaf, _)| self.at(leaf).contains("bias"));
        let (mut slabs, mut scales) = (Vec::new(), Vec::new());
        let mut biases = Vec::new();
        for &(leaf, rows) in leaves {
            let layer = self.at(leaf);
            let (name, size) = (layer.name("weight"), [rows, cols]);
            let merged = match self.loras {
                Some(loras) => loras.merged(&layer.shape("", rows, cols))?,
                None => None,
            };
            let rounded = match (self.form.int8_threads(&layer.prefix), &merged) {
                (None, _) => None,
                (Some(threads), None) => Some(self.source.int8(&name, size.into(), threads)?),
                (Some(threads), Some(_)) => {
                    let unusable = |source| Error::Tensor {
                        file: self.source.path().to_owned(),
                        tensor: name.clone(),
                        source,
                    };
                    let changed = written_out(&layer.slabs(size, &merged)?).map_err(unusable)?;
                    Some(self.source.round(&name, &changed, threads)?)
                }
            };
            match rounded {
                Some(rounded) => {
                    slabs.push(Slab::Dense(rounded.weight));
                    scales.push(rounded.scale);
                }
                None => slabs.extend(layer.slabs(size, &merged)?),
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
        let fp8 = leaves.iter().all(|(leaf, _)| self.is_fp8(&self.name(leaf)));
        let deltas = self.deltas(leaves, cols)?;
        let parts = match sort(slabs).map_err(tensor)? {
            Sorted::Dense(slabs) if scales.is_empty() => LinearParts::dense(slabs),
            Sorted::Dense(rows) => LinearParts::int8(rows, scales),
            Sorted::Packed(packed) => LinearParts::packed(packed),
        };
        let parts = parts.and_then(|parts| parts.with_bias(bias)?.with_deltas(deltas));
        parts.and_then(|parts| if fp8 { parts.in_fp8() } else { Ok(parts) }).map_err(linear)
    }

    /// The weight of the layer here, where it lies, perhaps to be changed where it is read.
    fn slabs(&self, size: [usize; 2], merged: &Option<(Arc<Merged>, DType)>) -> Result<Vec<Slab>> {
        let name = self.name("weight");
        let slabs = self.source.slabs(&name, size.into())?;
        let Some((change, dtype)) = merged else { return Ok(slabs) };
        let mut first = 0;
        let changed = |slab: Slab| {
            let matrix = slab.into_packed()?;
            let at = first;
            first += matrix.row_count();
            Ok(Slab::Packed(matrix.changed(change.clone(), at, *dtype)))
        };
        let changed = slabs.into_iter().map(changed).collect::<kiln_tensor::Result<_>>();
        changed.map_err(|source| Error::Tensor { file: self.source.path().to_owned(), tensor: name, source })
    }

    /// Whether products with the layer of this whole name are to be made in 8-bit floats.
    fn is_fp8(&self, module: &str) -> bool {
        match self.form {
            LinearForm::Fp8 => int8::takes(module),
            LinearForm::StoredFp8 => self.source.stores_fp8(module),
            LinearForm::Float | LinearForm::Int8 { .. } => false,
        }
    }

    /// What LoRAs add to the outputs of such a stack.
    pub fn deltas(&self, leaves: &[(&str, usize)], cols: usize) -> Result<Vec<Delta>> {
        let Some(loras) = self.loras else { return Ok(Vec::new()) };
        let stack: Vec<_> = leaves.iter().map(|&(leaf, rows)| self.shape(leaf, rows, cols)).collect();
        loras.deltas(&stack)
    }

    /// Whether LoRAs change a weight of such a stack itself, so that it has to be loaded anew when they change.
    pub fn is_merged(&self, leaves: &[(&str, usize)], cols: usize) -> bool {
        let merges = |loras: &LoraUpdates| {
            leaves.iter().any(|&(leaf, rows)| loras.merges(&self.shape(leaf, rows, cols)))
        };
        self.loras.is_some_and(merges)
    }

    fn shape(&self, leaf: &str, rows: usize, cols: usize) -> LayerShape {
        LayerShape { name: self.name(leaf), rows, cols }
    }
}

enum Sorted {
    Dense(Vec<HostTensor>),
    Packed(Vec<Packed>),
}

/// All values of slabs below each other, as f32.
fn written_out(slabs: &[Slab]) -> kiln_tensor::Result<HostTensor> {
    let (mut rows, mut values) = (0, Vec::new());
    for slab in slabs {
        let matrix = slab.clone().into_packed()?;
        rows += matrix.row_count();
        values.extend_from_slice(&matrix.to_f32()?.to_f32()?);
    }
    HostTensor::from_f32([rows, values.len() / rows.max(1)], values)
}

/// Slabs of one kind: one that is packed makes all so.
fn sort(slabs: Vec<Slab>) -> kiln_tensor::Result<Sorted> {
    if slabs.iter().any(|slab| matches!(slab, Slab::Packed(_))) {
        return slabs.into_iter().map(Slab::into_packed).collect::<Result<_, _>>().map(Sorted::Packed);
    }
    let dense = slabs.into_iter().filter_map(|slab| match slab {
        Slab::Dense(dense) => Some(dense),
        Slab::Packed(_) => None,
    });
    of_one_dtype(dense.collect()).map(Sorted::Dense)
}

fn of_one_dtype(slabs: Vec<HostTensor>) -> kiln_tensor::Result<Vec<HostTensor>> {
    match slabs.windows(2).all(|pair| pair[0].dtype() == pair[1].dtype()) {
        true => Ok(slabs),
        false => slabs.iter().map(|s| s.to_dtype(DType::F32)).collect(),
    }
}

/// Vectors end to end; one alone stays where it is.
fn concatenate(vectors: &[HostTensor]) -> kiln_tensor::Result<HostTensor> {
    let vectors = of_one_dtype(vectors.to_vec())?;
    match &vectors[..] {
        [one] => Ok(one.clone()),
        _ => {
            let bytes: Vec<u8> = vectors.iter().flat_map(|v| v.bytes().iter().copied()).collect();
            let dtype = vectors.first().map_or(DType::F32, HostTensor::dtype);
            HostTensor::new(dtype, [vectors.iter().map(HostTensor::numel).sum()], bytes.into())
        }
    }
}
