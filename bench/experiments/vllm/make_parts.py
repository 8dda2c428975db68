"""python3 make_parts.py FOLDER: the parts with which vLLM 0.25.1 runs on an H200 machine that has torch 2.11 (CUDA 13), Triton 3.6,
transformers 5.17 and Python 3.12: 45 MB in five files. Needs pip, xz, readelf, strip; 6 GB of disk for a while, some 6 minutes of two cores.

The wheel's 590 MB of extensions become 23: of each fatbin the code of other GPUs than sm_90 is overwritten with zeros (the driver picks an
entry by the architecture in its header and never reads the others), which xz then drops; where there is none for sm_90, PTX up to 9.0 stays.
Left out: FlashAttention 2 (an H200 uses 3), DeepGEMM, FlashMLA, QuTLASS, the Rust front end, headers, tuned tables of experts.
The packages are those that the machine's image lacks and `vllm.LLM` imports, found by importing everything with NVML answering as an H200's."""
import glob, os, re, shutil, struct, subprocess, sys, tempfile, zipfile

VLLM = "vllm==0.25.1"
PACKAGES = """annotated-types==0.8.0 anthropic==2.12.0 apache-tvm-ffi==0.1.15.post2 astor==0.8.1 blake3==1.0.11 cachetools==8.0.1 cbor2==6.3.0
cffi==2.1.1 compressed-tensors==0.17.0 cryptography==50.0.2 depyf==0.20.0 dill==0.4.1 diskcache==5.6.3 docstring-parser==0.18.0 fastapi==0.136.3
httpcore2==2.16.2 httptools==0.9.0 httpx2==2.16.2 ijson==3.6.0 interegular==0.3.3 jiter==0.19.0 jmespath==1.1.0 jsonschema==4.26.0
jsonschema-specifications==2025.9.1 lark==1.2.2 llguidance==1.7.6 lm-format-enforcer==0.11.3 loguru==0.7.3 mcp==2.3.0 mcp-types==2.3.0
mistral-common==1.13.1 model-hosting-container-standards==0.1.16 msgspec==0.22.0 nvtx==0.2.15 openai==3.54.0 openai-harmony==0.0.8
opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 opentelemetry-semantic-conventions-ai==0.5.1
outlines-core==0.2.14 partial-json-parser==0.2.1.1.post7 prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pycountry==26.2.16
pycparser==3.12 pydantic==2.14.3 pydantic-core==2.50.4 pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 pyjwt==2.15.1 python-dotenv==1.2.4
python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1
sse-starlette==3.7.0 starlette==1.10.0 truststore==0.10.5 typing-inspection==0.4.5 watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.8""".split()
PLATFORMS = [*(f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)), "manylinux2014_x86_64", "manylinux1_x86_64"]
KEPT = {  # extension: whether PTX stays where there is no code for sm_90
    "vllm/_C_stable_libtorch.abi3.so": True, "vllm/_moe_C_stable_libtorch.abi3.so": False, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": True,
}
SMALL = ("cumem_allocator", "spinloop", "fs_io_C")


def download(packages, folder):
    platforms = [word for p in PLATFORMS for word in ("--platform", p)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12",
        "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none", *platforms, "-d", folder, *packages], check=True)
    return sorted(glob.glob(f"{folder}/*.whl"))


def thinned(path, ptx):
    """Bytes of an ELF file whose fatbins hold code for sm_90 alone, in place."""
    data = bytearray(open(path, "rb").read())
    table = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout
    line = next(line for line in table.splitlines() if re.search(r"\.nv_fatbin\s", line)).split("]")[1].split()
    at, end = int(line[3], 16), int(line[3], 16) + int(line[4], 16)
    while at < end:
        if struct.unpack_from("<I", data, at)[0] != 0xBA55ED50:
            at += 8
            continue
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entries, entry = [], at + header
        while entry < at + header + size:
            kind, _, head, length = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            entries.append((kind, arch, entry + head, length))
            entry += head + length
        exact = any(kind == 2 and arch == 90 for kind, arch, *_ in entries)
        for kind, arch, begin, length in entries:
            if not ((kind, arch) == (2, 90) if exact else ptx and kind == 1 and arch <= 90):
                data[begin : begin + length] = bytes(length)
        at += header + size
    return bytes(data)


def xz(source, out):
    with open(out, "wb") as file:
        subprocess.run(["nice", "xz", "-9e", "-c", *([source] if source != "-" else [])], stdout=file, check=True)


def tarred(folder, out):
    tar = f"{out[:-3]}"
    subprocess.run(["tar", "cf", tar, "-C", folder, "."], check=True)
    xz(tar, out)
    os.remove(tar)


def main(out):
    os.makedirs(out, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as work:
        site = f"{work}/py"
        with zipfile.ZipFile(download([VLLM], f"{work}/v")[0]) as wheel:
            for name in wheel.namelist():
                if name in KEPT:
                    small = f"{work}/{os.path.basename(name)}"
                    wheel.extract(name, work)
                    open(small, "wb").write(thinned(f"{work}/{name}", KEPT[name]))
                    xz(small, f"{out}/{os.path.basename(name)}.xz")
                elif not re.search(r"\.(hpp|cuh|cu|h|inl|json|pyi)$|/tests/|third_party/(deep_gemm|fmha_sm100)/|instrumentator/static/|vllm-rs$", name) and (
                    not name.endswith(".so") or os.path.basename(name).split(".")[0] in SMALL
                ):
                    wheel.extract(name, site)
        info = f"{site}/lowbit-0.2.0.dist-info"  # the plug-in is found by it; the package itself comes with the tree
        os.makedirs(info)
        open(f"{info}/METADATA", "w").write("Metadata-Version: 2.1\nName: lowbit\nVersion: 0.2.0\n")
        open(f"{info}/entry_points.txt", "w").write("[vllm.general_plugins]\nlowbit = lowbit.vllm:register\n")
        tarred(site, f"{out}/py.tar.xz")
        deps = f"{work}/deps"
        for path in download(PACKAGES, f"{work}/d"):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(deps)
        for data in glob.glob(f"{deps}/*.data"):  # what a wheel brings for site-packages apart
            for part in ("purelib", "platlib"):
                if os.path.isdir(f"{data}/{part}"):
                    shutil.copytree(f"{data}/{part}", deps, dirs_exist_ok=True)
            shutil.rmtree(data)
        for unread in ("mistral_common/data", "pycountry/locales"):
            shutil.rmtree(f"{deps}/{unread}")
        for root, _, files in os.walk(deps):
            for name in files:
                path = f"{root}/{name}"
                if name.endswith(".pyi") or "/tests/" in path:
                    os.remove(path)
                elif ".so" in name and os.path.getsize(path) > 200_000:
                    subprocess.run(["strip", "--strip-unneeded", path], stderr=subprocess.DEVNULL)
        tarred(deps, f"{out}/deps.tar.xz")
    for name in sorted(os.listdir(out)):
        print(f"{os.path.getsize(f'{out}/{name}') / 1e6:6.1f} MB {name}")


main(sys.argv[1])
