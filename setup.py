"""pip packaging of the ROS-free part; with ROS, colcon builds the same by CMakeLists.txt."""

import xml.etree.ElementTree
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
MANIFEST = xml.etree.ElementTree.parse(HERE / "package.xml").getroot()

setup(
    name="reasoning_planner",
    version=MANIFEST.findtext("version"),
    description=MANIFEST.findtext("description"),
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["reasoning_planner", "reasoning_planner.*"]),
    data_files=[("share/reasoning_planner/engines",
                 sorted(map(str, Path("engines").glob("*.yaml"))))],
    package_data={"reasoning_planner": ["evaluation/templates/*", "checkpoints/*/*",
                                        "checkpoints/*/draft/*"]},
    install_requires=[
        "jsonschema>=4",
        "numpy>=1.21",
        "onnxruntime>=1.23",
        "opencv-python-headless>=4.5",
        "pyyaml>=5.4",
        "rosbags>=0.10",
        "tokenizers>=0.20",
        "tqdm>=4.57",
        "transforms3d>=0.4.1",
    ],
    extras_require={
        "report": ["jinja2>=3"],
        "bench": ["jinja2>=3", "safetensors>=0.4", "torch>=2.13", "transformers>=5.24"],
        "cluster": ["ray>=2.40"],
        "train": ["onnx>=1.19", "safetensors>=0.4", "torch>=2.13"],
        "trt": ["tensorrt-rtx-cu12-bindings>=1.7", "tensorrt-rtx-cu12-libs>=1.7"],
        "dev": ["flake8>=6", "hypothesis>=6", "pytest>=7.4", "transformers>=5.24"],
    },
    entry_points={"console_scripts": ["reasoning-planner = reasoning_planner.cli:main"]},
)
