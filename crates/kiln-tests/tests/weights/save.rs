//! Written files are read back unchanged, and are written atomically.

use std::collections::BTreeMap;
use std::fs;

use kiln_tensor::{DType, HostTensor};
use kiln_weights::save::save;
use kiln_weights::{Error, WeightSource};

fn sample() -> Vec<(&'static str, HostTensor)> {
    let f =
        HostTensor::from_f32([2, 3], vec![0.5, -1.0, 2.0, f32::MIN_POSITIVE, f32::INFINITY, -0.0]).unwrap();
    let bytes = |n: u8| (0..n).collect::<Vec<u8>>().into();
    vec![
        ("z.small", HostTensor::new(DType::Bool, [1], bytes(1)).unwrap()),
        ("latents", f.clone()),
        ("half \"quoted\" ü", f.to_dtype(DType::BF16).unwrap()),
        ("scalar", HostTensor::new(DType::I64, [], bytes(8)).unwrap()),
        ("empty", HostTensor::zeros([0, 4])),
    ]
}

#[test]
fn round_trip_keeps_tensors_and_metadata() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let metadata =
        BTreeMap::from([("seed".to_owned(), "7".to_owned()), ("prompt".into(), "a \"cat\"\n".into())]);
    save(&path, &sample(), &metadata).unwrap();
    let source = WeightSource::open(&path).unwrap();
    assert_eq!(source.metadata(), &metadata);
    assert_eq!(source.names().count(), sample().len());
    for (name, tensor) in sample() {
        assert_eq!(source.tensor(name).unwrap(), tensor, "{name}");
    }
}

#[test]
fn file_is_readable_by_the_safetensors_crate() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    save(&path, &sample(), &BTreeMap::new()).unwrap();
    let bytes = fs::read(&path).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.tensor("latents").unwrap().shape(), [2, 3]);
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(header % 8, 0, "the data is aligned");
    let start = |name: &str| read.tensor(name).unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize;
    assert_eq!((start("scalar") % 8, start("latents") % 4), (0, 0));
}

#[test]
fn same_input_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let metadata: BTreeMap<_, _> = (0..20).map(|i| (format!("key{i}"), i.to_string())).collect();
    let write = |name: &str| {
        save(dir.path().join(name), &sample(), &metadata).unwrap();
        fs::read(dir.path().join(name)).unwrap()
    };
    assert_eq!(write("a"), write("b"));
}

#[test]
fn existing_file_is_replaced_and_nothing_else_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    fs::write(&path, "old").unwrap();
    save(&path, &sample(), &BTreeMap::new()).unwrap();
    assert!(WeightSource::open(&path).is_ok());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn failed_save_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let twice = [("a", HostTensor::zeros([1])), ("a", HostTensor::zeros([2]))];
    let e = save(dir.path().join("x"), &twice, &BTreeMap::new()).unwrap_err();
    assert!(e.to_string().ends_with("the name is given twice"), "{e}");
    let e = save(dir.path().join("x"), &[("__metadata__", HostTensor::zeros([1]))], &BTreeMap::new())
        .unwrap_err();
    assert!(e.to_string().ends_with("the name is reserved"), "{e}");
    // A folder is rejected before anything is written.
    let e = save(dir.path(), &sample(), &BTreeMap::new()).unwrap_err();
    assert!(matches!(e, Error::NotAFile { .. }), "{e}");
    let missing = dir.path().join("no/such/folder/x");
    let e = save(&missing, &sample(), &BTreeMap::new()).unwrap_err();
    assert!(e.to_string().starts_with(&format!("can't write `{}`: ", missing.display())), "{e}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn device_is_not_replaced_by_a_file() {
    let e = save("/dev/null", &sample(), &BTreeMap::new()).unwrap_err();
    assert_eq!(e.to_string(), "`/dev/null` is not a regular file");
}

#[cfg(unix)]
#[test]
fn saved_file_has_the_permissions_of_a_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
    save(dir.path().join("saved"), &sample(), &BTreeMap::new()).unwrap();
    fs::write(dir.path().join("plain"), "").unwrap();
    assert_eq!(mode("saved"), mode("plain"));
}
