//! The moments of 8-bit AdamW: in 8 bits for large tensors, in f32 for small ones.

use kiln_ops::training::{BLOCK, CodeBook, Quantized8};
use kiln_ops::{Tensor as _, TrainingBackend};
use kiln_tensor::{DType, HostTensor, Shape};

use crate::state::{NAMES, find, upload};
use crate::{Error, Result, TrainerState};

/// Tensors of fewer elements keep f32 moments, as bitsandbytes' do: they take little memory.
const SMALLEST: usize = 4096;

/// First and second moment of a tensor.
pub(crate) enum Moments8<B: TrainingBackend> {
    Small([B::Tensor; 2]),
    Large([B::Quantized; 2]),
}

impl<B: TrainingBackend> Moments8<B> {
    /// Moments of zeros.
    pub(crate) fn new(b: &B, shape: &Shape) -> Result<Self> {
        let count = shape.numel();
        if count < SMALLEST {
            let zeros = || b.zeros(shape.clone(), DType::F32);
            return Ok(Moments8::Small([zeros()?, zeros()?]));
        }
        let zeros = |book: &CodeBook| b.upload_quantized(&Quantized8::zeros(count, book.code(0.0)));
        Ok(Moments8::Large([zeros(CodeBook::signed())?, zeros(CodeBook::unsigned())?]))
    }

    /// Adds the moments of the parameter `name` to a saved state.
    pub(crate) fn save(&self, b: &B, name: &str, state: &mut TrainerState) -> Result<()> {
        let mut put = |name: String, host: HostTensor| state.tensors.insert(name, host);
        match self {
            Moments8::Small(both) => {
                for (kind, tensor) in NAMES.iter().zip(both) {
                    put(format!("optimizer.{kind}.{name}"), b.download(tensor)?);
                }
            }
            Moments8::Large(both) => {
                for (kind, quantized) in NAMES.iter().zip(both) {
                    let Quantized8 { codes, scales } = b.download_quantized(quantized)?;
                    let codes = HostTensor::new(DType::U8, [codes.len()], codes.into())?;
                    let scales = HostTensor::from_f32([scales.len()], scales)?;
                    put(format!("optimizer.{kind}.codes.{name}"), codes);
                    put(format!("optimizer.{kind}.scales.{name}"), scales);
                }
            }
        }
        Ok(())
    }

    /// Replaces the moments by those of the parameter `name` in a saved state.
    pub(crate) fn restore(&mut self, b: &B, name: &str, state: &TrainerState) -> Result<()> {
        match (saved_8bit(state, name)?, self) {
            (None, Moments8::Small(both)) => {
                for (kind, tensor) in NAMES.iter().zip(both) {
                    upload(b, tensor, &format!("optimizer.{kind}.{name}"), state)?;
                }
            }
            (None, Moments8::Large(_)) => {
                return Err(Error::State(format!("the state has no 8-bit moments of `{name}`")));
            }
            // Older states have 8-bit moments of small tensors, too.
            (Some(saved), Moments8::Small(both)) => {
                let books = [CodeBook::signed(), CodeBook::unsigned()];
                for ((tensor, saved), book) in both.iter_mut().zip(&saved).zip(books) {
                    let (values, count) = (book.dequantize(saved), tensor.shape().numel());
                    if values.len() != count {
                        let found = values.len();
                        let what = format!("`{name}` has {found} 8-bit moments, expected {count}");
                        return Err(Error::State(what));
                    }
                    let host = HostTensor::from_f32(tensor.shape().clone(), values)?;
                    *tensor = b.upload(&host, DType::F32)?;
                }
            }
            (Some(saved), Moments8::Large(both)) => {
                for (quantized, saved) in both.iter_mut().zip(&saved) {
                    *quantized = b.upload_quantized(saved)?;
                }
            }
        }
        Ok(())
    }
}

/// The 8-bit moments of a parameter in a saved state; `None` if it has none.
fn saved_8bit(state: &TrainerState, name: &str) -> Result<Option<[Quantized8; 2]>> {
    let quantized = |kind: &str| -> Result<Quantized8> {
        let codes = find(&state.tensors, &format!("optimizer.{kind}.codes.{name}"))?;
        let scales = find(&state.tensors, &format!("optimizer.{kind}.scales.{name}"))?;
        let (codes, scales) = (codes.bytes().to_vec(), scales.to_f32()?.into_owned());
        if scales.len() != codes.len().div_ceil(BLOCK) {
            return Err(Error::State(format!("the 8-bit moments of `{name}` have {} scales", scales.len())));
        }
        Ok(Quantized8 { codes, scales })
    };
    if !state.tensors.contains_key(&format!("optimizer.m.codes.{name}")) {
        return Ok(None);
    }
    let [m, mut v] = [quantized("m")?, quantized("v")?];
    // Older states may have second moments that were rounded to 0, which the first ones tell.
    let zero = CodeBook::signed().code(0.0);
    for (v, m) in v.codes.iter_mut().zip(&m.codes) {
        *v = (*v).max(u8::from(*m != zero));
    }
    Ok(Some([m, v]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Optimizer;
    use crate::adapter::Param;
    use crate::optimizer::OptimizerState;
    use kiln_ops::Reference;

    fn eight_bit(counts: &[usize]) -> (Vec<Param<Reference>>, OptimizerState<Reference>, Vec<String>) {
        let b = Reference::new();
        let tensor = |count: usize| b.zeros([count].into(), DType::F32).unwrap();
        let param = |count: &usize| Param { name: "p", value: tensor(*count), grad: None };
        let params: Vec<_> = counts.iter().map(param).collect();
        let (betas, eps, weight_decay) = ([0.9, 0.999], 1e-8, 0.0);
        let settings = Optimizer::AdamW8bit { betas, eps, weight_decay };
        let named = params.iter().map(|param| (param.name.to_owned(), param));
        let optimizer = OptimizerState::new(&b, settings, named).unwrap();
        let names = counts.iter().map(|count| format!("layer{count}")).collect();
        (params, optimizer, names)
    }

    fn step(optimizer: &mut OptimizerState<Reference>, params: &mut [Param<Reference>], step: u64) {
        let b = Reference::new();
        for param in params.iter_mut() {
            let count = param.value.shape().numel();
            // Over five decades, so that the smallest second moments need the smallest code.
            let gradient = (0..count).map(|i| 10f32.powf(-((i % 101) as f32) / 20.0)).collect();
            param.grad = Some(HostTensor::from_f32([count], gradient).unwrap());
        }
        optimizer.step(&b, params.iter_mut().collect(), 0.01, step, 1.0).unwrap();
    }

    fn largest_change(before: &[Vec<f32>], params: &[Param<Reference>]) -> f32 {
        let values = |param: &Param<Reference>| param.value.to_f32().unwrap().into_owned();
        let pairs =
            before.iter().zip(params).flat_map(|(before, param)| before.iter().copied().zip(values(param)));
        pairs.map(|(before, after)| (after - before).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn small_tensors_keep_full_moments() {
        let (mut params, mut optimizer, names) = eight_bit(&[4095, 4096]);
        step(&mut optimizer, &mut params, 1);
        let mut state = TrainerState::default();
        optimizer.save(&Reference::new(), &names, &mut state).unwrap();
        let saved: Vec<&str> = state.tensors.keys().map(String::as_str).collect();
        let expected = [
            "optimizer.m.codes.layer4096",
            "optimizer.m.layer4095",
            "optimizer.m.scales.layer4096",
            "optimizer.v.codes.layer4096",
            "optimizer.v.layer4095",
            "optimizer.v.scales.layer4096",
        ];
        assert_eq!(saved, expected);
    }

    /// Before, small tensors had 8-bit moments, too, and small second moments were rounded to 0.
    #[test]
    fn an_older_state_continues_without_a_jump() {
        let counts = [300, 5000];
        let (mut params, mut optimizer, names) = eight_bit(&counts);
        step(&mut optimizer, &mut params, 1);
        let mut state = TrainerState::default();
        optimizer.save(&Reference::new(), &names, &mut state).unwrap();
        let mut older = TrainerState { step: 1, ..TrainerState::default() };
        for (name, count) in names.iter().zip(counts) {
            for (kind, book) in [("m", CodeBook::signed()), ("v", CodeBook::unsigned())] {
                let moments = match state.tensors.get(&format!("optimizer.{kind}.{name}")) {
                    Some(full) => full.to_f32().unwrap().into_owned(),
                    None => {
                        book.dequantize(&saved_8bit(&state, name).unwrap().unwrap()[usize::from(kind == "v")])
                    }
                };
                let (mut codes, mut scales) = (vec![0; count], vec![0.0; count.div_ceil(BLOCK)]);
                book.quantize(&moments, &mut codes, &mut scales);
                if kind == "v" {
                    codes.iter_mut().filter(|code| **code == 1).for_each(|code| *code = 0);
                    assert!(codes.contains(&0));
                }
                let codes = HostTensor::new(DType::U8, [count], codes.into()).unwrap();
                let scales = HostTensor::from_f32([scales.len()], scales).unwrap();
                older.tensors.insert(format!("optimizer.{kind}.codes.{name}"), codes);
                older.tensors.insert(format!("optimizer.{kind}.scales.{name}"), scales);
            }
        }
        let (_, mut resumed, _) = eight_bit(&counts);
        resumed.restore(&Reference::new(), &names, &older).unwrap();
        let before: Vec<_> = params.iter().map(|param| param.value.to_f32().unwrap().into_owned()).collect();
        step(&mut resumed, &mut params, 2);
        let change = largest_change(&before, &params);
        assert!(change > 0.005 && change < 0.03, "{change}");
    }
}
