//! The noise that images start from.

use kiln_tensor::rng::{Generator, Half};
use kiln_tensor::{DType, HostTensor};

use crate::error::{Error, Result};
use crate::request::Rng;

/// The most images of one request.
pub(crate) const MAX_IMAGES: usize = 1000;

/// Where the noise comes from.
#[derive(Clone, Debug)]
pub enum Noise {
    /// One generator draws the noise of all images at once.
    Seed {
        /// Its seed.
        seed: u64,
        /// Its kind.
        rng: Rng,
    },
    /// One image of a batch that one generator drew, to make it again without the others.
    Part {
        /// The generator's seed.
        seed: u64,
        /// Its kind.
        rng: Rng,
        /// Which image of the batch, from 0.
        index: usize,
        /// How many images the batch had.
        of: usize,
    },
    /// A generator an image.
    Seeds {
        /// Their seeds.
        seeds: Vec<u64>,
        /// Their kind.
        rng: Rng,
    },
    /// Given: `[images, 128, h/16, w/16]` as diffusers takes it, or packed `[images, tokens, 128]`; the first
    /// dimension may be missing for one image.
    Given(HostTensor),
}

/// The noise of every picture as tokens, f32 `[grid, channels]`, drawn as diffusers draws it: channels first, all
/// pictures of one generator in one go, and rounded when the model computes in `dtype`.
pub(crate) fn draw(
    noise: &Noise,
    pictures: usize,
    channels: usize,
    grid: [usize; 2],
    dtype: DType,
) -> Result<Vec<HostTensor>> {
    let tokens = grid[0] * grid[1];
    let size = channels * tokens;
    let pack = |values: &[f32]| {
        let packed = (0..size).map(|i| values[(i % channels) * tokens + i / channels]).collect();
        let noise = HostTensor::from_f32([tokens, channels], packed)?;
        Ok(noise.to_dtype(dtype)?.to_dtype(DType::F32)?)
    };
    match noise {
        Noise::Seed { seed, rng } => {
            generator(*rng, *seed).randn(pictures * size).chunks_exact(size).map(pack).collect()
        }
        Noise::Part { seed, rng, index, of } => {
            if pictures != 1 || index >= of || *of > MAX_IMAGES {
                return Err(Error::request(format!(
                    "picture {index} of a batch of {of} can't be the noise of {pictures} pictures"
                )));
            }
            // A draw depends on its length, so the others' noise is drawn as well.
            let all = generator(*rng, *seed).randn(of * size);
            Ok(vec![pack(&all[index * size..][..size])?])
        }
        Noise::Seeds { seeds, rng } => {
            if seeds.len() != pictures {
                let given = seeds.len();
                return Err(Error::request(format!("{given} seeds were given for {pictures} pictures")));
            }
            seeds.iter().map(|&seed| pack(&generator(*rng, seed).randn(size))).collect()
        }
        Noise::Given(noise) => given(noise, pictures, channels, grid, pack),
    }
}

fn generator(rng: Rng, seed: u64) -> Generator {
    match rng {
        Rng::Cpu => Generator::cpu(seed),
        Rng::CpuBf16 => Generator::cpu_half(seed, Half::Bf16),
        Rng::CpuF16 => Generator::cpu_half(seed, Half::F16),
        Rng::Cuda => Generator::cuda(seed),
    }
}

fn given(
    noise: &HostTensor,
    pictures: usize,
    channels: usize,
    [height, width]: [usize; 2],
    pack: impl Fn(&[f32]) -> Result<HostTensor>,
) -> Result<Vec<HostTensor>> {
    let tokens = height * width;
    let dims = noise.shape().dims();
    let values = noise.to_f32()?;
    if dims.ends_with(&[channels, height, width])
        && dims[..dims.len() - 3].iter().product::<usize>() == pictures
    {
        return values.chunks_exact(channels * tokens).map(pack).collect();
    }
    if dims.ends_with(&[tokens, channels]) && dims[..dims.len() - 2].iter().product::<usize>() == pictures {
        let packed = |v: &[f32]| Ok(HostTensor::from_f32([tokens, channels], v.to_vec())?);
        return values.chunks_exact(channels * tokens).map(packed).collect();
    }
    Err(Error::request(format!(
        "the noise has shape {}, expected [{pictures}, {channels}, {height}, {width}] or [{pictures}, {tokens}, \
         {channels}]",
        noise.shape()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_and_unpacked_noise_mean_the_same() {
        let unpacked = HostTensor::from_f32([1, 3, 2, 2], (0..12).map(|v| v as f32).collect()).unwrap();
        let packed =
            HostTensor::from_f32([4, 3], vec![0., 4., 8., 1., 5., 9., 2., 6., 10., 3., 7., 11.]).unwrap();
        let draw = |n: &HostTensor| draw(&Noise::Given(n.clone()), 1, 3, [2, 2], DType::F32).unwrap();
        assert_eq!(draw(&unpacked), draw(&packed));
        assert_eq!(draw(&packed)[0], packed);
    }

    #[test]
    fn one_generator_draws_what_its_pictures_get_in_turn() {
        let two = draw(&Noise::Seed { seed: 5, rng: Rng::Cpu }, 2, 16, [1, 2], DType::F32).unwrap();
        let one = draw(&Noise::Seed { seed: 5, rng: Rng::Cpu }, 1, 16, [1, 2], DType::F32).unwrap();
        assert_eq!(two[0], one[0]);
        assert_ne!(two[0], two[1]);
    }

    #[test]
    fn a_part_of_a_batch_has_the_noise_it_had_in_the_batch() {
        for rng in [Rng::Cpu, Rng::CpuBf16, Rng::CpuF16, Rng::Cuda] {
            let all = draw(&Noise::Seed { seed: 9, rng }, 3, 16, [1, 3], DType::F32).unwrap();
            for (index, one) in all.iter().enumerate() {
                let part = Noise::Part { seed: 9, rng, index, of: 3 };
                assert_eq!(draw(&part, 1, 16, [1, 3], DType::F32).unwrap(), std::slice::from_ref(one));
            }
        }
        let outside = Noise::Part { seed: 9, rng: Rng::Cpu, index: 3, of: 3 };
        assert!(draw(&outside, 1, 16, [1, 3], DType::F32).is_err());
    }

    #[test]
    fn noise_of_another_size_is_refused() {
        let noise = Noise::Given(HostTensor::zeros([1, 128, 4, 4]));
        let e = draw(&noise, 1, 128, [4, 6], DType::F32).unwrap_err().to_string();
        assert!(e.contains("[1, 128, 4, 4]") && e.contains("[1, 128, 4, 6]"), "{e}");
    }
}
