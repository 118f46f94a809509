//! What a text encoder's files tell beside its weights: the order of its q and k rows, the width of a head, the tokenizer.

use kiln_tensor::DType;

use super::WeightSource;
use crate::layout::{HEAD_DIM, Q_NORM};
use crate::{Error, MetadataArray, Result};

/// The widest head that is guessed from the shapes of tensors: that of every published text encoder.
const USUAL_HEAD_DIM: usize = 128;

impl WeightSource {
    /// Whether neighbouring rows of q and k rotate together, instead of rows half a head apart: the order of llama.cpp's
    /// files of Llama and Mistral models. Of a text encoder, from [`WeightSource::component`].
    pub fn has_interleaved_rotary(&self) -> bool {
        self.interleaved_rotary
    }

    /// The width of a text encoder's head: the length of its norms; else what the metadata says; else the largest power of
    /// two that divides the rows of q and k, up to 128. `None` if it is no text encoder.
    pub fn head_dim(&self) -> Option<usize> {
        let rows = |name: &str| self.entry(name)?.1.dims().first().copied();
        if let Some(dim) = rows(Q_NORM) {
            return Some(dim);
        }
        if let Some(text) = self.metadata().get(HEAD_DIM) {
            // What is not a number is a problem of the configuration.
            return Some(text.parse().unwrap_or(0));
        }
        let q = rows("model.layers.0.self_attn.q_proj.weight")?;
        let k = rows("model.layers.0.self_attn.k_proj.weight")?;
        let common = 1 << (q | k).trailing_zeros().min(USUAL_HEAD_DIM.ilog2());
        Some(common)
    }

    /// The bytes in a tensor that is no weight, such as the tokenizer in `tekken_model`; `None` if there is no such tensor.
    ///
    /// ComfyUI's files have bytes as `u8`, gguf-org's as floats, since GGUF has no bytes.
    pub fn byte_tensor(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some((dtype, _)) = self.entry(name) else { return Ok(None) };
        let invalid =
            |reason| Error::InvalidTensor { file: self.path().to_owned(), tensor: name.to_owned(), reason };
        let tensor = self.tensor(name)?;
        if dtype == DType::U8 && self.packed_format(name).is_none() {
            return Ok(Some(tensor.bytes().to_vec()));
        }
        let values = tensor.to_f32().map_err(|_| invalid("its values are no bytes"))?;
        let byte = |value: &f32| {
            let byte = *value as u8;
            if f32::from(byte) == *value { Ok(byte) } else { Err(invalid("it has values that are no bytes")) }
        };
        values.iter().map(byte).collect::<Result<_>>().map(Some)
    }

    /// An array of texts or integers in the metadata of a GGUF file, such as `tokenizer.ggml.tokens`. Of other values,
    /// [`WeightSource::metadata`] has the text.
    pub fn gguf_array(&self, key: &str) -> Result<Option<MetadataArray<'_>>> {
        self.files.iter().find_map(|file| file.array(key).transpose()).transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kiln_tensor::HostTensor;

    use super::*;
    use crate::{Component, save};

    fn encoder(name: &str, tensors: &[(&str, HostTensor)]) -> WeightSource {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(name);
        save::save(&file, tensors, &BTreeMap::new()).unwrap();
        let bytes = std::fs::read(&file).unwrap();
        let source = WeightSource::from_bytes(name, bytes).unwrap();
        source.component(Component::TextEncoder).unwrap().unwrap()
    }

    fn q_and_k(prefix: &str, q: usize, k: usize) -> WeightSource {
        let [q_name, k_name] = ["q", "k"].map(|leaf| format!("{prefix}.self_attn.{leaf}_proj.weight"));
        encoder("a", &[(&q_name, HostTensor::zeros([q, 4])), (&k_name, HostTensor::zeros([k, 4]))])
    }

    #[test]
    fn the_width_of_a_head_follows_from_q_and_k() {
        assert_eq!(q_and_k("model.layers.0", 4096, 1024).head_dim(), Some(128));
        assert_eq!(q_and_k("language_model.model.layers.0", 96, 48).head_dim(), Some(16));
        let stated = q_and_k("model.layers.0", 96, 48).with_metadata([(HEAD_DIM.into(), "48".into())]);
        assert_eq!(stated.head_dim(), Some(48));
        let wrong = q_and_k("model.layers.0", 96, 48).with_metadata([(HEAD_DIM.into(), "x".into())]);
        assert_eq!(wrong.head_dim(), Some(0));
    }

    #[test]
    fn only_llama_cpp_rows_without_norms_are_interleaved() {
        let q = ("blk.0.attn_q.weight", HostTensor::zeros([4, 4]));
        let norm = ("blk.0.attn_q_norm.weight", HostTensor::zeros([4]));
        assert!(encoder("a", std::slice::from_ref(&q)).has_interleaved_rotary());
        assert!(!encoder("a", &[q, norm]).has_interleaved_rotary());
        assert!(!q_and_k("model.layers.0", 4, 4).has_interleaved_rotary());
    }

    #[test]
    fn a_tokenizer_is_read_from_bytes_and_from_floats() {
        let q = ("model.layers.0.self_attn.q_proj.weight", HostTensor::zeros([4, 4]));
        let text = b"{\"config\":\xff}";
        let bytes = HostTensor::new(DType::U8, [text.len()], text.to_vec().into()).unwrap();
        let values: Vec<f32> = text.iter().map(|b| f32::from(*b)).collect();
        let floats = HostTensor::from_f32([text.len()], values).unwrap();
        // A byte as f16: its highest bit gives the exponent, the others the mantissa.
        let half = |byte: &u8| {
            let exponent = byte.ilog2() as u16;
            (exponent + 15) << 10 | (u16::from(*byte) << (10 - exponent)) & 0x3ff
        };
        let halves: Vec<u8> = text.iter().flat_map(|byte| half(byte).to_le_bytes()).collect();
        let halves = HostTensor::new(DType::F16, [text.len()], halves.into()).unwrap();
        for tensor in [bytes, floats, halves] {
            let source = encoder("a", &[q.clone(), ("tekken_model", tensor)]);
            assert_eq!(source.byte_tensor("tekken_model").unwrap().as_deref(), Some(&text[..]));
        }
        assert_eq!(encoder("a", std::slice::from_ref(&q)).byte_tensor("tekken_model").unwrap(), None);
        let broken = HostTensor::from_f32([2], vec![12.0, 3.5]).unwrap();
        let error = encoder("enc.gguf", &[q, ("tekken_model", broken)])
            .byte_tensor("tekken_model")
            .unwrap_err()
            .to_string();
        assert!(error.contains("enc.gguf") && error.contains("tekken_model"), "{error}");
    }
}
