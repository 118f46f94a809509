//! Random weights from a recipe: the numbers that a generator of torch's was seeded with.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use kiln_tensor::rng::TorchCpu;
use kiln_tensor::{DType, HostTensor, bf16};
use serde::Deserialize;

/// `recipe.json`: the tensors of each component.
type Recipe = BTreeMap<String, RandomComponent>;

#[derive(Deserialize)]
struct RandomComponent {
    tensors: Vec<RandomTensor>,
}

/// A tensor of bf16 values: `mean + std · randn`, given values, or rows from small tables.
#[derive(Deserialize)]
struct RandomTensor {
    name: String,
    shape: Vec<usize>,
    #[serde(default)]
    mean: f32,
    #[serde(default)]
    std: f32,
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    values: Vec<f32>,
    /// Of each table, row `i` of the tensor has row `i` modulo the number of rows, side by side.
    #[serde(default)]
    tables: Vec<Table>,
    /// Bound of a table's values, which the largest of each row is set to.
    #[serde(default)]
    top: f32,
    /// A row that is drawn by itself.
    end: Option<Row>,
}

#[derive(Deserialize)]
struct Table {
    rows: usize,
    seed: u64,
}

#[derive(Deserialize)]
struct Row {
    row: usize,
    std: f32,
    seed: u64,
}

/// Draws normal values times `std`.
fn draw(seed: u64, std: f32, count: usize) -> Vec<f32> {
    TorchCpu::new(seed).randn(count).into_iter().map(|v| std * v).collect()
}

impl RandomTensor {
    fn tensor(&self) -> Result<HostTensor, String> {
        let values = if !self.values.is_empty() {
            self.values.clone()
        } else if self.tables.is_empty() {
            let drawn = draw(self.seed, self.std, self.shape.iter().product());
            drawn.into_iter().map(|v| self.mean + v).collect()
        } else {
            self.rows_of_tables()
        };
        let bytes: Vec<u8> = values.into_iter().flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect();
        HostTensor::new(DType::BF16, self.shape.clone(), bytes.into()).map_err(|e| e.to_string())
    }

    fn rows_of_tables(&self) -> Vec<f32> {
        let (rows, width) = (self.shape[0], self.shape[1] / self.tables.len());
        let tables: Vec<Vec<f32>> = self.tables.iter().map(|table| self.table(table, width)).collect();
        let mut values = Vec::with_capacity(rows * self.shape[1]);
        for row in 0..rows {
            for (table, drawn) in self.tables.iter().zip(&tables) {
                values.extend_from_slice(&drawn[row % table.rows * width..][..width]);
            }
        }
        if let Some(end) = &self.end {
            let own = draw(end.seed, end.std, self.shape[1]);
            values[end.row * self.shape[1]..][..own.len()].copy_from_slice(&own);
        }
        values
    }

    fn table(&self, table: &Table, width: usize) -> Vec<f32> {
        let mut values = draw(table.seed, self.std, table.rows * width);
        for row in values.chunks_exact_mut(width) {
            row.iter_mut().for_each(|v| *v = v.clamp(-self.top, self.top));
            if let Some(largest) = row.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())) {
                *largest = self.top.copysign(*largest);
            }
        }
        values
    }
}

/// Writes the components of `recipe.json` in `from` to folders in `to`.
pub(crate) fn write(from: &Path, to: &Path) -> Result<(), String> {
    let file = from.join("recipe.json");
    let text = fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let recipe: Recipe = serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", file.display()))?;
    for (component, RandomComponent { tensors }) in &recipe {
        let drawn = tensors.iter().map(|t| Ok((t.name.as_str(), t.tensor()?)));
        let drawn = drawn.collect::<Result<Vec<_>, String>>()?;
        let file = to.join(component).join("model.safetensors");
        kiln_weights::save::save(file, &drawn, &BTreeMap::new()).map_err(|e| e.to_string())?;
    }
    Ok(())
}
