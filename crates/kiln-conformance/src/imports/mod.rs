//! Detects import cycles between the files of a crate, for tests that keep its layers apart.
//!
//! A file uses another if it names an item that the other defines: by `use` or by a path in its code, directly or through
//! re-exports. Declaring a module or re-exporting an item does not count. Methods on values of other files' types, and tests,
//! are not considered.

mod source;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fs;
use std::path::Path;

use source::{Import, SourceFile};

/// The path of a module from the crate root.
type Module = Vec<String>;

/// Returns the shortest import cycle of every group of files that use each other: `["a.rs", "b.rs"]` if `a.rs` uses `b.rs`
/// and `b.rs` uses `a.rs`. `src` is the folder of a crate's `lib.rs`.
///
/// # Panics
///
/// If the folder can't be read.
pub fn import_cycles(src: &Path) -> Vec<Vec<String>> {
    let files = CrateFiles::read(src);
    let uses: BTreeMap<&str, BTreeSet<&str>> =
        files.modules.keys().map(|module| (files.name(module), files.used_by(module))).collect();
    let mut cycles: Vec<Vec<String>> = Vec::new();
    let mut visited = BTreeSet::new();
    for &file in uses.keys() {
        if visited.contains(file) {
            continue;
        }
        let after = reachable(&uses, file);
        let component: Vec<&str> =
            after.iter().copied().filter(|&other| reachable(&uses, other).contains(file)).collect();
        if component.contains(&file) {
            visited.extend(component.iter().copied());
            cycles
                .extend(component.iter().filter_map(|file| shortest_cycle(&uses, file)).min_by_key(Vec::len));
        }
    }
    cycles
}

/// Returns every file that this one uses, directly or indirectly.
fn reachable<'a>(uses: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &str) -> BTreeSet<&'a str> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_string()]);
    while let Some(file) = next.pop() {
        for &used in uses.get(file.as_str()).into_iter().flatten() {
            if seen.insert(used) {
                next.push(used.into());
            }
        }
    }
    seen
}

/// Returns the shortest path from a file back to itself.
fn shortest_cycle(uses: &BTreeMap<&str, BTreeSet<&str>>, from: &str) -> Option<Vec<String>> {
    let mut queue = VecDeque::from([vec![from]]);
    let mut seen = BTreeSet::new();
    while let Some(path) = queue.pop_front() {
        for &used in path.last().and_then(|file| uses.get(file)).into_iter().flatten() {
            if used == from {
                return Some(path.iter().map(|file| file.to_string()).collect());
            }
            if seen.insert(used) {
                queue.push_back([path.as_slice(), &[used]].concat());
            }
        }
    }
    None
}

/// The files of a crate, by module path.
struct CrateFiles {
    modules: HashMap<Module, (String, SourceFile)>,
}

impl CrateFiles {
    fn read(src: &Path) -> CrateFiles {
        let mut files = CrateFiles { modules: HashMap::new() };
        files.read_folder(src, src);
        let tests: Vec<Module> = files
            .modules
            .iter()
            .flat_map(|(module, (_, source))| {
                source.tests.iter().map(|test| [module.as_slice(), std::slice::from_ref(test)].concat())
            })
            .collect();
        files.modules.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        files
    }

    fn read_folder(&mut self, src: &Path, folder: &Path) {
        let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for path in entries.map(|entry| entry.expect("an entry of the folder").path()) {
            if path.is_dir() {
                self.read_folder(src, &path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(src).unwrap_or(&path).to_string_lossy().replace('\\', "/");
                let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                let mut module: Module = name.trim_end_matches(".rs").split('/').map(String::from).collect();
                if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "main")) {
                    module.pop();
                }
                self.modules.insert(module, (name, SourceFile::parse(&text)));
            }
        }
    }

    fn name(&self, module: &Module) -> &str {
        &self.modules[module].0
    }

    /// Returns the files whose items a module names.
    fn used_by(&self, module: &Module) -> BTreeSet<&str> {
        let source = &self.modules[module].1;
        let imports = source.imports.iter().filter(|import| {
            // A re-export counts only if this file also uses the name.
            !import.public || (import.name != "*" && source.words.contains(&import.name))
        });
        let imported = imports.filter_map(|import| self.defined(module, &import.path, 0));
        let named = source.paths.iter().filter_map(|path| self.defined(module, path, 0));
        imported.chain(named).filter(|defined| *defined != module).map(|module| self.name(module)).collect()
    }

    /// Resolves `path` in `module` to the module that defines the item; `None` for a module itself and for other crates' items.
    fn defined(&self, module: &Module, path: &[String], depth: usize) -> Option<&Module> {
        let (mut at, mut rest) = self.start(module, path, depth)?;
        while let [name, further @ ..] = rest {
            let below = [at.as_slice(), std::slice::from_ref(name)].concat();
            if !self.modules.contains_key(&below) {
                return self.item(&at, rest, depth);
            }
            (at, rest) = (below, further);
        }
        None
    }

    /// Resolves the start of a path to a module, and returns the rest.
    fn start<'a>(&self, module: &Module, path: &'a [String], depth: usize) -> Option<(Module, &'a [String])> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some((Vec::new(), rest)),
            "self" => Some((module.clone(), rest)),
            "super" => {
                let mut at = module.clone();
                at.pop()?;
                // `super::super`.
                if rest.first().is_some_and(|next| next == "super") {
                    self.start(&at, rest, depth)
                } else {
                    Some((at, rest))
                }
            }
            name => {
                let below = [module.as_slice(), &[name.to_string()]].concat();
                if self.modules.contains_key(&below) {
                    return Some((below, rest));
                }
                // A module that was imported.
                let import = self.modules[module].1.imports.iter().find(|import| import.name == name)?;
                self.module(module, import, depth).map(|module| (module, rest))
            }
        }
    }

    /// Returns the module that an import names, if it is one.
    fn module(&self, module: &Module, import: &Import, depth: usize) -> Option<Module> {
        if depth > 20 || import.path.first() == Some(&import.name) {
            return None;
        }
        let (at, rest) = self.start(module, &import.path, depth + 1)?;
        let whole = [at.as_slice(), rest].concat();
        self.modules.contains_key(&whole).then_some(whole)
    }

    /// Returns the module that defines the first name of `path` in `module`.
    fn item(&self, module: &Module, path: &[String], depth: usize) -> Option<&Module> {
        let (module, (_, source)) = self.modules.get_key_value(module)?;
        let name = path.first()?;
        if source.items.contains(name) || depth > 20 {
            return Some(module);
        }
        if let Some(import) = source.imports.iter().find(|import| import.name == *name) {
            let further = [import.path.as_slice(), &path[1..]].concat();
            return self.defined(module, &further, depth + 1);
        }
        for import in source.imports.iter().filter(|import| import.name == "*") {
            let further = [import.path.as_slice(), path].concat();
            if let Some(found) = self.defined(module, &further, depth + 1)
                && self.modules[found].1.words.contains(name)
            {
                return Some(found);
            }
        }
        // The definition may come from a macro.
        Some(module)
    }
}

#[cfg(test)]
mod tests;
