//! [`WeightSource`], the tensors of one or more files.

mod content;
mod inspect;
mod int8;
mod text_encoder;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kiln_family::{Family, Variant, default_family};
use kiln_tensor::{DType, HostTensor, Shape};

use crate::encoding::{self, QuantizationConfig, Tensors};
use crate::file::{WeightFile, not_found_or};
use crate::folder::{self, WeightsLocation};
use crate::layout::{self, Component, View};
use crate::pages::{PageRanges, Span};
use crate::source_tensor::{RowBlock, SourceTensor};
use crate::synthetic::Synthetic;
use crate::{Error, LinearPrecision, Result, index, similar};

/// One or more safetensors or GGUF files read as one set of named tensors. It is immutable, and clones share it.
///
/// Opening reads the headers only; the data stays in the mapped files and is read when it is used.
#[derive(Clone, Debug)]
pub struct WeightSource {
    path: PathBuf,
    files: Arc<[WeightFile]>,
    /// By name.
    tensors: Arc<BTreeMap<String, SourceTensor>>,
    metadata: Arc<BTreeMap<String, String>>,
    unclaimed: Arc<Unclaimed>,
    interleaved_rotary: bool,
    /// Of a component: the family that its tensor names tell.
    family: Option<&'static Family>,
    /// Generates tensors for a source without files.
    synthetic: Option<Arc<Synthetic>>,
}

/// Of a component: the file's tensors that no component of the file has.
#[derive(Debug, Default)]
pub(crate) struct Unclaimed {
    pub names: Vec<String>,
    pub several_components: bool,
}

impl WeightSource {
    /// Opens a safetensors or GGUF file, a list of shards (`X.safetensors.index.json`), or a component folder.
    ///
    /// In a folder, `model.safetensors` is preferred to a list of shards, as in transformers, and a list of shards to any
    /// other file, as in diffusers. Of several files, the one named `diffusion_pytorch_model` or `model` is used, and a
    /// variant such as `model.fp16.safetensors` only if there is no plain file. If several remain, it is an error.
    ///
    /// Tensors have their names in the file; [`WeightSource::component`] gives them the model's. Scales are not listed, but
    /// read with the tensors they belong to. A `quantization_config` in the folder's `config.json` is checked: weights in a
    /// format that Kiln does not read are an error with its name.
    ///
    /// The files are mapped into memory and must not be changed while the source or one of its tensors exists. To replace a
    /// weight file that a program uses, write a new one and rename it over the old.
    pub fn open(path: impl AsRef<Path>) -> Result<WeightSource> {
        let path = path.as_ref();
        let metadata = std::fs::metadata(path).map_err(|e| not_found_or(path, e))?;
        let location = if metadata.is_dir() {
            folder::locate(path)
        } else if folder::is_index(path) {
            Ok(WeightsLocation::Index(path.to_owned()))
        } else {
            Ok(WeightsLocation::File(path.to_owned()))
        };
        // Before an error about the files: a format that Kiln doesn't read often has none that it could open.
        let described =
            folder::of_config(path).filter(|_| !location.as_ref().is_ok_and(WeightsLocation::is_gguf));
        let config = described.map(QuantizationConfig::read).transpose()?.flatten();
        let files = match location? {
            WeightsLocation::Index(index) => index::open(&index)?,
            WeightsLocation::File(file) => vec![WeightFile::open(&file)?],
        };
        WeightSource::join(path, files, config)
    }

    /// The folder whose `config.json` describes the weights at `path`: the folder itself, or that of a list of shards or of
    /// a safetensors file with a usual name (`model`, `diffusion_pytorch_model`). Files with other names may lie beside a
    /// configuration that is not theirs.
    pub fn config_folder(path: &Path) -> Option<&Path> {
        let is_gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        folder::of_config(path).filter(|_| !is_gguf)
    }

    /// Reads a safetensors or GGUF file that is already in memory, without a copy; `name` stands for its path in messages.
    pub fn from_bytes(name: impl AsRef<Path>, data: impl Into<Bytes>) -> Result<WeightSource> {
        let path = name.as_ref();
        WeightSource::join(path, vec![WeightFile::from_bytes(path, data.into())?], None)
    }

    /// A source without files that generates random bf16 values for every tensor, so that a model can be measured
    /// without its weights. At most `budget` bytes are allocated; tensors beyond that share memory with others.
    ///
    /// ```
    /// let source = kiln_weights::WeightSource::synthetic(1 << 20);
    /// assert_eq!(source.root().linear("any.name", 30, 20)?.rows(), 30);
    /// assert_eq!(source.synthetic_bytes(), Some((1200, 1200)));
    /// # Ok::<(), kiln_weights::Error>(())
    /// ```
    pub fn synthetic(budget: u64) -> WeightSource {
        WeightSource {
            path: "synthetic weights".into(),
            files: Arc::new([]),
            tensors: Arc::default(),
            metadata: Arc::default(),
            unclaimed: Arc::default(),
            interleaved_rotary: false,
            family: None,
            synthetic: Some(Arc::new(Synthetic::new(budget))),
        }
    }

    /// Like [`WeightSource::synthetic`], with linear layers in Q4_K where their rows are whole blocks.
    pub fn synthetic_q4_k(budget: u64) -> WeightSource {
        let synthetic = Some(Arc::new(Synthetic::new(budget).with_q4_k()));
        WeightSource { synthetic, ..WeightSource::synthetic(0) }
    }

    /// Of a [synthetic](WeightSource::synthetic) source: the bytes of all requested tensors, and of the memory behind them.
    pub fn synthetic_bytes(&self) -> Option<(u64, u64)> {
        self.synthetic.as_ref().map(|synthetic| synthetic.sizes())
    }

    /// Joins files; `config` is that of the folder they are in.
    fn join(
        path: &Path,
        mut files: Vec<WeightFile>,
        config: Option<QuantizationConfig>,
    ) -> Result<WeightSource> {
        let mut tensors = Tensors::new();
        let mut metadata = BTreeMap::new();
        for i in 0..files.len() {
            for (name, entry) in std::mem::take(&mut files[i].entries) {
                if let Some((first, _)) = tensors.get(&name) {
                    return Err(Error::DuplicateTensor {
                        tensor: name,
                        first: files[*first].path.clone(),
                        second: files[i].path.clone(),
                    });
                }
                tensors.insert(name, (i, entry));
            }
            for (key, value) in std::mem::take(&mut files[i].metadata) {
                metadata.entry(key).or_insert(value);
            }
        }
        let mut configs = QuantizationConfig::of_header(path, &metadata)?;
        configs.extend(config);
        encoding::attach_scales(&mut tensors, &files, &metadata, &configs)?;
        let tensors = tensors.into_iter();
        let tensors = tensors.map(|(name, (file, entry))| (name, SourceTensor::whole(file, entry)));
        Ok(WeightSource {
            path: path.to_owned(),
            tensors: Arc::new(tensors.collect()),
            files: files.into(),
            metadata: Arc::new(metadata),
            unclaimed: Arc::default(),
            interleaved_rotary: false,
            family: None,
            synthetic: None,
        })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The file or folder that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, or all shards.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|f| f.path.as_path())
    }

    /// The `__metadata__` of the header. If several shards have a key, the first one's value counts.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The same source with more metadata, which an export writes to its file. These values replace the source's own.
    pub fn with_metadata(self, more: impl IntoIterator<Item = (String, String)>) -> WeightSource {
        let mut metadata = BTreeMap::clone(&self.metadata);
        metadata.extend(more);
        WeightSource { metadata: Arc::new(metadata), ..self }
    }

    /// Dtype and shape of a tensor, without reading its data. Packed tensors have the dtype of their codes.
    pub fn entry(&self, name: &str) -> Option<(DType, &Shape)> {
        self.tensors.get(name).map(|tensor| (tensor.entry.dtype, &tensor.shape))
    }

    /// The tensors of one component under the model's names, whatever names and layout the file has; `None` if it does not
    /// have the component.
    ///
    /// ```
    /// use kiln_tensor::HostTensor;
    /// use kiln_weights::{Component, WeightSource, save};
    ///
    /// let dir = tempfile::tempdir()?;
    /// let file = dir.path().join("flux-2-klein-4b.safetensors");
    /// let weights = [
    ///     ("model.diffusion_model.single_stream_modulation.lin.weight", HostTensor::zeros([6, 2])),
    ///     ("model.diffusion_model.double_blocks.0.img_attn.qkv.weight", HostTensor::zeros([6, 2])),
    /// ];
    /// save::save(&file, &weights, &Default::default())?;
    /// let transformer = WeightSource::open(&file)?.component(Component::Transformer)?.unwrap();
    /// assert_eq!(transformer.tensor("transformer_blocks.0.attn.to_v.weight")?.shape().dims(), [2, 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn component(&self, component: Component) -> Result<Option<WeightSource>> {
        let all = layout::detect(self.names());
        let Some(detected) = all.iter().find(|d| d.scheme.component == component) else { return Ok(None) };
        let mut tensors = BTreeMap::new();
        let mut unclaimed = Unclaimed { names: Vec::new(), several_components: all.len() > 1 };
        for (name, tensor) in &*self.tensors {
            match layout::owner(&all, name) {
                Some(owner) if owner.scheme.component == component => {}
                Some(_) => continue,
                None => {
                    unclaimed.names.push(name.clone());
                    continue;
                }
            }
            for (model_name, view) in detected.model_tensors(name) {
                // One scale of int8 rows is that of every slice of them.
                let one_scale = self.is_row_scale(name) && tensor.shape.numel() == 1;
                let view = if one_scale { View::Whole } else { view };
                let slice = tensor.with_view(view).ok_or_else(|| Error::CannotSplit {
                    file: self.file_of(tensor).path.clone(),
                    tensor: name.clone(),
                    found: tensor.shape.clone(),
                    parts: format!("such as `{model_name}`"),
                })?;
                if tensors.insert(model_name.clone(), slice).is_some() {
                    return Err(Error::TwoNames { file: self.path.clone(), tensor: model_name });
                }
            }
        }
        let mut metadata = BTreeMap::clone(&self.metadata);
        let architecture = self.metadata.get("general.architecture").map_or("", String::as_str);
        for (gguf_key, setting) in layout::GGUF_SETTINGS {
            let known = self.metadata.get(&format!("{architecture}{gguf_key}"));
            metadata.extend(known.map(|value| (setting.to_owned(), value.clone())));
        }
        let component = self.with_tensors(tensors);
        let interleaved_rotary = detected.has_llama_cpp_names() && !component.contains(layout::Q_NORM);
        let (metadata, unclaimed) = (Arc::new(metadata), Arc::new(unclaimed));
        let family = detected.scheme.family;
        Ok(Some(WeightSource { metadata, unclaimed, interleaved_rotary, family, ..component }))
    }

    /// The family of a component: what its tensor names tell, else its metadata; else the default.
    pub fn family(&self) -> &'static Family {
        let stated = || {
            let name = [Variant::KEY, Variant::GUESS_KEY].iter().find_map(|key| self.metadata.get(*key))?;
            Some(name.parse::<Variant>().ok()?.family)
        };
        self.family.or_else(stated).unwrap_or_else(default_family)
    }

    /// Opens a file or folder that must have this component.
    pub fn open_component(path: impl AsRef<Path>, component: Component) -> Result<WeightSource> {
        let source = WeightSource::open(path)?;
        let missing =
            || Error::WrongComponent { file: source.path.clone(), component, found: source.describe() };
        source.component(component)?.ok_or_else(missing)
    }

    fn with_tensors(&self, tensors: BTreeMap<String, SourceTensor>) -> WeightSource {
        WeightSource {
            path: self.path.clone(),
            files: Arc::clone(&self.files),
            tensors: Arc::new(tensors),
            metadata: Arc::clone(&self.metadata),
            unclaimed: Arc::default(),
            interleaved_rotary: false,
            family: None,
            synthetic: None,
        }
    }

    pub(crate) fn unclaimed(&self) -> &Unclaimed {
        &self.unclaimed
    }

    /// The tensors whose names begin with `prefix` and a dot, under the rest of their names: one component of a model whose
    /// components share a file. `None` if there are none.
    pub fn subtree(&self, prefix: &str) -> Option<WeightSource> {
        let rest = |name: &str| Some(name.strip_prefix(prefix)?.strip_prefix('.')?.to_owned());
        let tensors: BTreeMap<_, _> =
            self.tensors.iter().filter_map(|(name, tensor)| Some((rest(name)?, tensor.clone()))).collect();
        (!tensors.is_empty()).then(|| self.with_tensors(tensors))
    }

    /// The tensor of this name, sharing the file's bytes. A missing one is an error with similar names.
    ///
    /// A packed tensor, or an int8 tensor `X` with the scales of its rows in `X_scale`, is dequantized to f32; fp8 without
    /// scales to bf16. Both are exact.
    pub fn tensor(&self, name: &str) -> Result<HostTensor> {
        let tensor = self.find(name)?;
        self.values(name, tensor)
    }

    /// The tensor of this name without the scales of int8 rows.
    pub(crate) fn stored(&self, name: &str) -> Result<HostTensor> {
        self.find(name)?.tensor(&self.files, name)
    }

    fn values(&self, name: &str, tensor: &SourceTensor) -> Result<HostTensor> {
        let values = match self.int8_rows(name, tensor)? {
            Some(rows) => rows.to_f32().and_then(|values| values.reshape(&tensor.shape)),
            None => {
                let stored = tensor.tensor(&self.files, name)?;
                if stored.dtype().is_fp8() { stored.to_dtype(DType::BF16) } else { Ok(stored) }
            }
        };
        values.map_err(unusable(self.file_of(tensor), name))
    }

    fn file_of(&self, tensor: &SourceTensor) -> &WeightFile {
        &self.files[tensor.file]
    }

    /// Releases the pages of a tensor after all of it was read.
    pub(crate) fn release(&self, name: &str) {
        if let Some(tensor) = self.tensors.get(name) {
            self.file_of(tensor).release(&tensor.entry);
        }
    }

    /// The matrix `name`, which must have this shape, for a linear layer: not copied, packed as stored.
    pub(crate) fn row_blocks(&self, name: &str, shape: Shape) -> Result<Vec<RowBlock>> {
        if let Some(synthetic) = &self.synthetic {
            let packed = synthetic.packed(&shape).transpose();
            let packed = packed.map_err(|source| Error::Tensor {
                file: self.path.clone(),
                tensor: name.to_owned(),
                source,
            })?;
            return Ok(vec![match packed {
                Some(packed) => RowBlock::Packed(packed),
                None => RowBlock::Dense(self.tensor_with_shape(name, shape)?),
            }]);
        }
        let tensor = self.find(name)?;
        let dtype = tensor.entry.dtype;
        if !tensor.is_packed() && matches!(dtype, DType::I8 | DType::U8) && !self.is_int8(name) {
            return Err(Error::UnsupportedQuantization {
                file: self.file_of(tensor).path.clone(),
                module: name.trim_end_matches(".weight").to_owned(),
                problem: encoding::unknown_bytes(dtype),
            });
        }
        let tensor = self.find_with_shape(name, shape)?;
        match self.int8_rows(name, tensor)? {
            Some(rows) => Ok(vec![RowBlock::Packed(rows)]),
            None => tensor.row_blocks(&self.files, name),
        }
    }

    /// The tensor of this name, which must have this shape.
    pub(crate) fn tensor_with_shape(&self, name: &str, shape: Shape) -> Result<HostTensor> {
        if let Some(synthetic) = &self.synthetic {
            return synthetic.tensor(name, &shape).map_err(|source| Error::Tensor {
                file: self.path.clone(),
                tensor: name.to_owned(),
                source,
            });
        }
        let tensor = self.find_with_shape(name, shape)?;
        self.values(name, tensor)
    }

    pub(crate) fn find_with_shape(&self, name: &str, shape: Shape) -> Result<&SourceTensor> {
        let tensor = self.find(name)?;
        if tensor.shape != shape {
            return Err(Error::Shape {
                file: self.file_of(tensor).path.clone(),
                tensor: name.to_owned(),
                found: tensor.shape.clone(),
                expected: shape,
            });
        }
        Ok(tensor)
    }

    fn find(&self, name: &str) -> Result<&SourceTensor> {
        self.tensors.get(name).ok_or_else(|| Error::MissingTensor {
            file: self.path.clone(),
            tensor: name.to_owned(),
            similar: similar::similar_names(name, self.names()),
            count: self.tensors.len(),
        })
    }

    /// The pages of the tensors whose names begin with `prefix`, without those that are quantized to int8 when they are
    /// loaded and not read again.
    pub(crate) fn page_ranges(&self, prefix: &str, precision: LinearPrecision) -> PageRanges {
        let below = self.tensors.range(prefix.to_owned()..).take_while(|(name, _)| name.starts_with(prefix));
        let span = |(name, tensor): (&String, &SourceTensor)| {
            if matches!(precision, LinearPrecision::Int8 { .. }) && self.is_quantizable(name) {
                return None;
            }
            let range = tensor.range();
            Some(Span { file: self.file_of(tensor).mapped.clone()?, start: range.start, end: range.end })
        };
        PageRanges::new(below.filter_map(span).collect())
    }
}

fn unusable(file: &WeightFile, name: &str) -> impl FnOnce(kiln_tensor::Error) -> Error {
    |source| Error::Tensor { file: file.path.clone(), tensor: name.to_owned(), source }
}
