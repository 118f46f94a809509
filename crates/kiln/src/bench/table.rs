//! Text tables with aligned columns.

use std::fmt;

/// A table; its first column is left-aligned, the others are right-aligned.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(header: &[&str]) -> Table {
        Table { rows: vec![header.iter().map(|title| (*title).to_owned()).collect()] }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let length =
            |row: &Vec<String>, column: usize| row.get(column).map_or(0, |cell| cell.chars().count());
        let widths: Vec<usize> =
            (0..columns).map(|c| self.rows.iter().map(|row| length(row, c)).max().unwrap_or(0)).collect();
        for (i, row) in self.rows.iter().enumerate() {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| match column {
                0 => format!("{cell:width$}"),
                _ => format!("{cell:>width$}"),
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
            if i == 0 {
                let rules: Vec<String> = widths.iter().map(|&width| "─".repeat(width)).collect();
                writeln!(f, "{}", rules.join("  "))?;
            }
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["phase", "s"]);
        table.row(["vae decode".into(), "1.5".into()]);
        assert_eq!(table.to_string(), "phase         s\n──────────  ───\nvae decode  1.5\n\n");
    }
}
