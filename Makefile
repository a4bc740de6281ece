# make demo | test | test-trt | bench | ros | lint | locks | clean. Everything is made below this folder: no root needed.
# With a sourced ROS 2 distribution its rclpy is used; without one, real ROS 2 comes as wheels.
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
LOCKS := .ci/requirements
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
RUN := source install/setup.bash && export PATH="$(CURDIR)/$(VENV)/bin:$$PATH" &&
SOURCES := package.xml CMakeLists.txt $(shell find msg launch config engines reasoning_planner \
	-type f -not -name '*.pyc')

.PHONY: demo test test-trt bench ros lint locks clean

demo: install/.built
	$(RUN) reasoning-planner demo --out out/demo

test: install/.built $(VENV)/.test
	$(RUN) pytest test

test-trt: install/.built $(VENV)/.test  ## TensorRT-RTX, proprietary: parses and builds, no GPU
	$(PIP) --no-deps -r $(LOCKS)/trt.txt
	$(RUN) pytest test/test_build_trt.py test/test_trt_build.py

bench: install/.built $(VENV)/.test
	$(RUN) reasoning-planner bench --out out/bench

ros: install/.built
	@echo "source $(CURDIR)/install/setup.bash && export PATH=$(CURDIR)/$(VENV)/bin:\$$PATH"

lint: $(VENV)/.test
	$(VENV)/bin/flake8 --max-line-length 99 --per-file-ignores=test/*:E402 \
	    reasoning_planner test launch setup.py .ci

$(VENV)/.run: $(LOCKS)/run.txt $(LOCKS)/ros.txt .ci/fix_ros_wheels.py setup.py
	$(PYTHON) -m venv $(if $(ROS_DISTRO),--system-site-packages) $(VENV)
	$(PIP) -r $(LOCKS)/run.txt $(if $(ROS_DISTRO),,-r $(LOCKS)/ros.txt)
	$(if $(ROS_DISTRO),,$(VENV)/bin/python .ci/fix_ros_wheels.py)
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.test: $(VENV)/.run $(LOCKS)/test.txt
	$(PIP) -r $(LOCKS)/test.txt
	touch $@

# CMake refuses to export include folders that lie below the source folder, and the environment
# does: so the package is built through a link beside which it does not.
install/.built: $(VENV)/.run $(SOURCES)
	mkdir -p .ros/src && ln -sfn ../.. .ros/src/reasoning_planner
	export PATH="$(CURDIR)/$(VENV)/bin:$$PATH" \
	    AMENT_PREFIX_PATH="$(CURDIR)/$(VENV):$$AMENT_PREFIX_PATH" \
	    CMAKE_PREFIX_PATH="$(CURDIR)/$(VENV):$$CMAKE_PREFIX_PATH" && \
	colcon --log-base .ros/log build --base-paths .ros/src --build-base .ros/build --symlink-install \
	    --event-handlers console_direct- --cmake-args -DBUILD_TESTING=OFF \
	    -DPython3_EXECUTABLE="$(CURDIR)/$(VENV)/bin/python"
	touch $@

locks:  ## write the lock files anew (needs uv)
	uv pip compile setup.py --extra report --universal --python-version 3.10 --no-header \
	    --no-annotate --no-emit-index-url -o $(LOCKS)/run.txt
	uv pip compile $(LOCKS)/ros.in --universal --python-version 3.10 --no-header \
	    --no-annotate --no-emit-index-url -c $(LOCKS)/run.txt -o $(LOCKS)/ros.txt
	# torch brings CUDA's own packages where its build needs them: they are not pinned here
	uv pip compile $(LOCKS)/test.in --universal --python-version 3.10 --no-header \
	    --no-annotate --no-emit-index-url -c $(LOCKS)/run.txt -c $(LOCKS)/ros.txt \
	    | grep -vE '^(cuda-|nvidia-|triton)' > $(LOCKS)/test.txt

clean:
	rm -rf $(VENV) .ros build install log out
